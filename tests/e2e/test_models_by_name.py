"""`longleaf serve` with the name of a model, or a GGUF file, gets the model before it starts."""

from pathlib import Path

import pytest

from longleaf.config import embedded_model
from tests.support.command_line import Served
from tests.support.gguf_files import write_llama
from tests.support.hub import Hub, serving

pytestmark = pytest.mark.extended
OPTIONS = ("--launcher", "local", "--kv-bytes", "8000000")


def environment(tmp_path: Path, **variables: str) -> tuple[str, ...]:
    """A command that sets variables; the service is then not forked, so that libraries read them."""
    given = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf"), **variables}
    return ("env", *(f"{name}={value}" for name, value in given.items()))


def test_model_of_the_hub_is_served_and_ranks_stay_offline(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in embedded_model().iterdir()}
    with serving(Hub({"acme/finder": files})) as hub:
        before = environment(tmp_path, HF_ENDPOINT=hub.url, NO_PROXY="*")
        with Served(*OPTIONS, "--model", "acme/finder", before=before) as service:
            assert "acme/finder on 127.0.0.1" in service.output
            assert service.json("cluster", "--json")["model"]["name"] == "finder"
            num_calls = len(hub.calls)
            service.run("ingest", "-", "--name", "note", stdin="The access code for amber falcon is 4711.")
            found = service.run("ask", "note", "What is the access code for amber falcon?")
            assert "amber falcon is 4711" in found.stdout
            assert len(hub.calls) == num_calls and set(hub.unknown) <= {"/api/agent-harnesses"}
    with Served(*OPTIONS, "--model", "acme/finder", before=environment(tmp_path, HF_HUB_OFFLINE="1")) as service:
        assert "using the downloaded copy of acme/finder" in service.output


def test_gguf_file_is_converted_at_the_first_start(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "tiny.gguf")
    for message in ("converting tiny.gguf (Q8_0, Q4_0, F32; ", "using the converted copy of tiny.gguf in "):
        with Served(*OPTIONS, "--model", str(file), before=environment(tmp_path)) as service:
            assert message in service.output
            assert service.json("cluster", "--json")["model"]["name"] == "tiny"
            found = service.run("generate", "--prompt", "ab", "--max-tokens", "4", "--ignore-end-token")
            assert found.returncode == 0, found.stderr
