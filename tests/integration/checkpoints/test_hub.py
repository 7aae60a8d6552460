"""Models of the hub are downloaded by name, completely or not; each refusal is one sentence with the remedy.

The commands run as processes, because huggingface_hub reads its environment when it is imported.
"""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longleaf.config import embedded_model
from longleaf.fingerprint import read_fingerprint
from tests.support.hub import Hub, Refusal, serving
from tests.support.small_disk import small_disk

NAME = "acme/lookup"
FILES = {path.name: path.read_bytes() for path in embedded_model().iterdir() if path.suffix != ".md"}
OTHERS = {
    "README.md": b"about",
    "modeling_acme.py": b"raise SystemExit('code was executed')",
    "pytorch_model.bin": b"pickle",
    "original/model.safetensors": b"another copy",
    "consolidated.safetensors": b"a third copy",
}
HF_VARIABLES = [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({NAME: FILES | OTHERS})) as found:
        yield found


class Command:
    """`longleaf models`, with a new cache."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.cache = folder / "cache"
        self._environment = {name: value for name, value in os.environ.items() if name not in HF_VARIABLES}
        self._environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(self.cache), "HF_HUB_DISABLE_XET": "1"}
        self._environment |= {"NO_PROXY": "*", "LC_ALL": "C.UTF-8"}

    def __call__(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-c", "from longleaf.cli.main import main; main()", "models", *arguments]
        environment = self._environment | variables
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def models(hub: Hub, tmp_path: Path) -> Command:
    return Command(hub, tmp_path)


def error_of(done: "subprocess.CompletedProcess[str]") -> str:
    """The error, which is the last line and the only one without progress."""
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert [line.startswith("error: ") for line in lines].count(True) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[-1].removeprefix("error: ")


def test_model_is_downloaded_into_a_folder_and_without_code_and_pickles(hub: Hub, models: Command, tmp_path: Path):
    done = models("fetch", NAME, str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == FILES
    assert read_fingerprint(tmp_path / "model").digest in done.stdout
    assert f"5 files, {sum(map(len, FILES.values())) / 2**20:.1f} MiB" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if "model" in path.name] == ["model"]
    assert not any(name in call for name in OTHERS for call in hub.calls)


def test_cache_serves_repeated_calls_and_calls_without_a_network(hub: Hub, models: Command):
    first = models("fetch", NAME)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.split(": ")[0])
    assert folder.is_relative_to(models.cache) and folder.name == hub.commit
    hub.calls.clear()
    assert models("fetch", NAME).stdout == first.stdout
    assert (hub.count("storage"), hub.count("content")) == (0, 0)
    offline = models("fetch", NAME, HF_ENDPOINT="http://127.0.0.1:9")  # where nothing listens
    assert offline.stdout == first.stdout
    assert f"using the downloaded copy of {NAME}: 127.0.0.1:9 cannot be reached" in offline.stderr
    forbidden = models("fetch", NAME, HF_HUB_OFFLINE="1")
    assert forbidden.stdout == first.stdout


def test_revision_is_the_wanted_one(hub: Hub, models: Command):
    assert models("fetch", f"hf://{NAME}@v1").returncode == 0
    assert f"api {NAME}/revision/v1" in hub.calls
    missing = models("fetch", f"{NAME}@v9")
    assert missing.returncode == 2
    assert error_of(missing) == f"{NAME} has no revision v9 on 127.0.0.1:{hub.port}"


def weights(num_bytes: int) -> bytes:
    """A safetensors file. huggingface_hub writes, and resumes, pieces of 10 MiB."""
    content = random.Random(7).randbytes(num_bytes)
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + content


def storage_ranges(hub: Hub) -> list[str]:
    """The ranges of the calls to the storage, in order."""
    return [" ".join(call.split()[2:]) for call in hub.calls if call.startswith("storage")]


def test_broken_transfer_resumes_within_a_call(hub: Hub, models: Command, tmp_path: Path):
    content = hub.models[NAME]["model.safetensors"] = weights(22 << 20)
    hub.cut_after, hub.num_cuts = 12 << 20, 1
    done = models("fetch", NAME, str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == content
    assert storage_ranges(hub) == ["", f"bytes={10 << 20}-"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("has_folder", [False, True])
def test_failed_download_creates_no_model_and_the_next_call_fetches_the_missing_files(
    hub: Hub, models: Command, tmp_path: Path, has_folder: bool
):
    target = [str(tmp_path / "model")] if has_folder else []
    hub.refusals["storage"] = Refusal(503)
    failed = models("fetch", NAME, *target)
    assert failed.returncode == 1
    assert "HTTP status 503: repeat the command later, which continues" in error_of(failed)
    assert not (tmp_path / "model").exists()
    hub.refusals.clear()
    hub.calls.clear()
    done = models("fetch", NAME, *target)
    assert done.returncode == 0, done.stderr
    assert not any("tokenizer.json" in call for call in hub.calls if not call.startswith("api"))


def test_incomplete_copy_in_the_cache_is_not_used_without_a_network(hub: Hub, models: Command):
    hub.refusals["storage"] = Refusal(503)
    assert models("fetch", NAME).returncode == 1
    offline = models("fetch", NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert offline.returncode == 1
    assert error_of(offline).startswith(f"127.0.0.1:9 cannot be reached for {NAME} (")
    assert "check the network, HF_ENDPOINT and HTTPS_PROXY" in offline.stderr


def test_token_goes_to_the_hub_and_not_to_the_storage(hub: Hub, models: Command):
    hub.token = "hf_right"
    private = models("fetch", NAME)
    assert private.returncode == 2
    assert error_of(private) == (
        f"{NAME} is neither a folder here nor a model on 127.0.0.1:{hub.port}, or it is private: set HF_TOKEN"
    )
    wrong = models("fetch", NAME, HF_TOKEN="hf_wrong")
    assert error_of(wrong) == f"127.0.0.1:{hub.port} rejects the token for {NAME}: check HF_TOKEN"
    done = models("fetch", NAME, HF_TOKEN="hf_right")
    assert done.returncode == 0, done.stderr
    assert hub.count("storage") == 1 and hub.leaked == []


REFUSALS = {
    "gated": (
        Refusal(403, {"X-Error-Code": "GatedRepo"}),
        2,
        "acme/lookup is gated: accept its conditions at http://HUB/acme/lookup, and set HF_TOKEN to its token",
    ),
    "forbidden": (Refusal(403), 2, r"HUB denies access to acme/lookup: the token in use lacks the permission"),
    "missing": (
        Refusal(404, {"X-Error-Code": "RepoNotFound"}),
        2,
        r"acme/lookup is neither a folder here nor a model on HUB, or it is private: set HF_TOKEN",
    ),
    "limited": (
        Refusal(429, {"Retry-After": "90"}),
        1,
        r"HUB limits the rate of downloads: repeat the command in 1 min 30 s; HF_TOKEN raises the limit",
    ),
    "limited, by window": (
        Refusal(429, {"RateLimit": '"api";r=0;t=55'}),
        1,
        r"HUB limits the rate of downloads: repeat the command in 55 s; HF_TOKEN raises the limit",
    ),
    "failing": (Refusal(500), 1, r"HUB failed with HTTP status 500: repeat the command later, which continues"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_is_one_sentence_with_the_remedy(hub: Hub, models: Command, name: str):
    hub.refusals["api"], code, message = REFUSALS[name]
    done = models("fetch", NAME)
    assert re.fullmatch(message.replace("HUB", f"127.0.0.1:{hub.port}"), error_of(done))
    assert done.returncode == code


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pytorch_model.bin": b""}, "but in pytorch_model.bin: pickles can execute code, and are not downloaded"),
        ({"a-Q4_K_M.gguf": b""}, "but in GGUF files: download one, such as a-Q4_K_M.gguf, and give --model FILE.gguf"),
    ],
)
def test_weights_in_other_formats_are_named_before_anything_is_downloaded(
    hub: Hub, models: Command, files: dict[str, bytes], message: str
):
    hub.models[NAME] = {"config.json": b"{}", **files}
    done = models("fetch", NAME)
    assert error_of(done) == f"{NAME} has no weights in safetensors {message}"
    assert hub.count("metadata") == 0


def test_full_disk_is_named(hub: Hub, models: Command, tmp_path: Path):
    with small_disk(models.cache, 2 << 20):
        done = models("fetch", NAME)
    assert done.returncode == 1
    assert re.match(f"{NAME} does not fit: no space is left at .*; free some, or set HF_HOME", error_of(done))
