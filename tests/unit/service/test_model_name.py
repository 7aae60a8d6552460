"""The name of a model that clients see: the configured one, or that of its folder."""

import os
from pathlib import Path

import pytest

from longleaf.cli import app
from longleaf.codec import encode_cluster
from longleaf.config import EngineConfig, check_model_name
from longleaf.errors import InvalidArgument
from longleaf.service_settings import ServiceConfig
from longleaf.types import Cluster, ModelInfo


@pytest.mark.parametrize("name", ["x" * 256, "acme/Größe 7B", "世界", "null", "-x", "🦙"])
def test_readable_names_are_accepted(name: str) -> None:
    check_model_name(name)


@pytest.mark.parametrize(
    "name", ["", " ", "a\nb", "\x1b[31m", "a ", "a\u202eb", "\0", os.fsdecode(b"\xff"), "x" * 257], ids=ascii
)
def test_other_names_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app.main(["serve", f"--model-name={name}"])
    message = "error: --model-name: must be 1 to 256 printable characters without a space at the start or end\n"
    assert (end.value.code, capsys.readouterr().err) == (2, message)


def test_service_config_refuses_invalid_names() -> None:
    with pytest.raises(InvalidArgument, match="^model_name: must be 1 to 256"):
        ServiceConfig(engine=EngineConfig(), model_name="a\nb").check()


@pytest.mark.parametrize(("folder", "name"), [(b"my-model", "my-model"), (b"odd\xff", "odd\ufffd")], ids=ascii)
def test_default_name_is_that_of_the_folder(folder: bytes, name: str, tmp_path: Path) -> None:
    path, link = tmp_path / os.fsdecode(folder), tmp_path / "link"
    path.mkdir()
    link.symlink_to(path)
    for model in (path, link):
        assert ServiceConfig(engine=EngineConfig(model=str(model))).shown_name == name
        assert ServiceConfig(engine=EngineConfig(model=str(model)), model_name="other").shown_name == "other"
    cluster = Cluster(model=ModelInfo(name=name), workers=(), world_size=1, epoch=1, launcher="ray", merge="auto")
    assert encode_cluster(cluster).model.name == name
