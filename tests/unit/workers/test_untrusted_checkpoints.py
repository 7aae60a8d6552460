"""No code of a checkpoint is executed: neither its Python files nor a pickle, regardless of standard input."""

import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longleaf.errors import LongleafError, ModelRefused
from longleaf.model_report import TextReport
from tests.support import forked
from workers.model import model as models
from workers.model.meta_model import outline
from zoo.checkpoints import make_checkpoint

CODE = """
from pathlib import Path
Path(__file__).with_name("it ran").touch()
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PixtralVisionModel
class Config(LlamaConfig):
    model_type = "untrusted"
class Model(LlamaForCausalLM):
    config_class = Config
def generate(model, **kwargs):
    return "never"
"""
OWN = {"AutoConfig": "untrusted.Config", "AutoModelForCausalLM": "untrusted.Model", "AutoModel": "untrusted.Model"}


class UntrustedCheckpoint:
    """A checkpoint with custom code, which creates a file if it is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "model"
        self._marker = folder / "marker"

    def make(self, family: Any = "llama") -> "UntrustedCheckpoint":
        make_checkpoint(self.folder, family, num_layers=1)
        for name in ("untrusted.py", "custom_generate/generate.py"):
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(CODE.format(marker=str(self._marker)))
        return self

    def configure(self, change: Callable[[dict[str, Any]], object]) -> None:
        path = self.folder / "config.json"
        settings = json.loads(path.read_text())
        change(settings)
        path.write_text(json.dumps(settings))

    @property
    def payload(self) -> "Touch":
        return Touch(self._marker)

    def check_asleep(self) -> None:
        assert not self._marker.exists()
        assert not list(self.folder.rglob("it ran"))


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self._path}'",)


@pytest.fixture
def untrusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UntrustedCheckpoint:
    """An untrusted checkpoint, with a terminal that answers yes to every question."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return UntrustedCheckpoint(tmp_path).make()


def refusals(folder: Path) -> list[str]:
    """The reasons for the refusal of a checkpoint: on the meta device, and when it is loaded."""
    reasons: list[str] = []
    for read in (lambda: outline(str(folder), "auto").model, lambda: models.load(str(folder), "auto", "cpu")):
        with pytest.raises(ModelRefused) as caught:
            read()
        reasons.append(str(caught.value))
    return reasons


@pytest.mark.extended
@pytest.mark.parametrize(
    ("text", "options"),
    [
        pytest.param("y\n" * 9, [], id="yes"),
        pytest.param("", ["--load"], id="nothing", marks=pytest.mark.slow),
    ],
)
def test_models_check_refuses_code_without_asking(tmp_path: Path, text: str, options: list[str]) -> None:
    checkpoint = UntrustedCheckpoint(tmp_path).make()
    checkpoint.configure(lambda settings: settings.update(model_type="untrusted", auto_map=OWN))
    found = forked.run([*forked.CLI, "models", "check", str(checkpoint.folder), *options], input=text)
    assert (found.returncode, found.stderr) == (2, "")
    assert "custom code, which Longleaf never runs" in found.stdout
    assert "[y/N]" not in found.stdout
    checkpoint.check_asleep()


def test_serve_refuses_code_without_asking(tmp_path: Path) -> None:
    checkpoint = UntrustedCheckpoint(tmp_path).make()
    checkpoint.configure(lambda settings: settings.update(model_type="untrusted", auto_map=OWN))
    command = [*forked.CLI, "serve", "--model", str(checkpoint.folder), "--launcher", "local", "--port", "0"]
    found = forked.run(command, input="y\n" * 9)
    assert found.returncode == 2
    assert "custom code, which Longleaf never runs" in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr
    checkpoint.check_asleep()


def test_code_required_by_a_config_is_refused(untrusted: UntrustedCheckpoint) -> None:
    untrusted.configure(lambda settings: settings.update(model_type="untrusted", auto_map=OWN))
    assert all("custom code, which Longleaf never runs" in reason for reason in refusals(untrusted.folder))
    untrusted.check_asleep()


@pytest.mark.parametrize("auto_map", [OWN, {"AutoConfig": "some/where--untrusted.Config"}, "untrusted.Model", [1]])
def test_known_model_uses_the_library_class_despite_custom_code(
    untrusted: UntrustedCheckpoint, auto_map: object
) -> None:
    untrusted.configure(lambda settings: settings.update(auto_map=auto_map))
    for model in (outline(str(untrusted.folder), "auto").model, models.load(str(untrusted.folder), "auto", "cpu")):
        assert type(model.module).__module__.startswith("transformers.models.llama")
    untrusted.check_asleep()


def test_code_named_by_a_sub_config_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models create their sub-models without passing on `trust_remote_code`."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    checkpoint = UntrustedCheckpoint(tmp_path).make("mistral3")
    named = {"model_type": "blip_vision_model", "auto_map": {"AutoModel": f"{checkpoint.folder}--untrusted.Model"}}
    checkpoint.configure(lambda settings: settings["vision_config"].update(named))
    refusals(checkpoint.folder)
    checkpoint.check_asleep()


def pickled(untrusted: UntrustedCheckpoint, name: str) -> None:
    """Replaces the weights with a pickle that executes code."""
    safe = untrusted.folder / "model.safetensors"
    torch.save(load_file(safe) | {"program": untrusted.payload}, untrusted.folder / name)
    safe.unlink()


def test_pickle_of_these_tests_executes_code(untrusted: UntrustedCheckpoint, tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(untrusted.payload))
    assert (tmp_path / "marker").exists()


def test_pickled_weights_are_refused(untrusted: UntrustedCheckpoint) -> None:
    pickled(untrusted, "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"no file named model\.safetensors"):
        models.load(str(untrusted.folder), "auto", "cpu")
    untrusted.check_asleep()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "weights.safetensors.index.json"])
def test_index_that_names_pickles_is_refused(untrusted: UntrustedCheckpoint, name: str) -> None:
    names = dict.fromkeys(load_file(untrusted.folder / "model.safetensors"), "evil.bin")
    pickled(untrusted, "evil.bin")
    (untrusted.folder / name).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    if not name.startswith("model"):
        untrusted.configure(lambda settings: settings.update(transformers_weights=name))
    with pytest.raises(ModelRefused, match=r"evil\.bin: only safetensors is supported"):
        models.load(str(untrusted.folder), "auto", "cpu")
    untrusted.check_asleep()


def test_config_that_names_a_pickle_is_refused(untrusted: UntrustedCheckpoint) -> None:
    pickled(untrusted, "adapter_model.bin")
    untrusted.configure(lambda settings: settings.update(transformers_weights="adapter_model.bin"))
    with pytest.raises(ModelRefused, match=r"adapter_model\.bin: only safetensors is supported"):
        models.load(str(untrusted.folder), "auto", "cpu")
    untrusted.check_asleep()


def test_missing_report_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from longleaf.cli import models as command

    for module in ("this", "antigravity_is_no_module"):
        with pytest.raises(LongleafError, match=module):
            command._inspect(module, [], TextReport)
