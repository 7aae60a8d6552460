"""The changes to the released wire format that `make check` accepts or refuses."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[3] / "protos"
RELEASED = PROTOS / "released.yaml"
BUF = Path(sys.executable).with_name("buf")
GENERATION, SERVICE = "generation.proto", "generation_service.proto"


def breaks(protos: Path, against: Path = RELEASED) -> str:
    """The findings for the wire format in `protos`; empty if it breaks nothing."""
    command = [BUF, "breaking", protos, "--against", against]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode == 0) == (found.stdout == ""), found.stderr
    return found.stdout


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROTOS, tmp_path / "protos"))


def change(protos: Path, file: str, before: str, after: str) -> None:
    path = protos / "longleaf" / "v1" / file
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def test_wire_format_is_compatible_with_the_release() -> None:
    assert breaks(PROTOS) == ""


CLUSTER = "cluster_service.proto"
BREAKS: dict[str, tuple[list[tuple[str, str, str]], list[str]]] = {
    "field removed": ([(GENERATION, "  int64 token_index = 1;", "")], ['field "1"', '"token_index"', '"Delta"']),
    "field renumbered": (
        [(GENERATION, "token_index = 1", "token_index = 9")],
        ['field "1"', '"token_index"', '"Delta"'],
    ),
    "field renamed": ([(GENERATION, "int64 token_index", "int64 place")], ['"token_index"', '"place"', '"Delta"']),
    "number given to another": ([(GENERATION, "int64 token_index = 1", "string word = 1")], ['"Delta"', '"word"']),
    "JSON name": ([(GENERATION, "token_index = 1", 'token_index = 1 [json_name = "i"]')], ['"Delta"', '"i"']),
    "type": ([(GENERATION, "int64 token_index", "int32 token_index")], ['"token_index"', '"Delta"', '"int32"']),
    "type in a map": ([(GENERATION, "map<int32, float>", "map<int32, double>")], ['"LogitBiasEntry"', '"double"']),
    "label": ([(GENERATION, "repeated string stop ", "string stop ")], ['"stop"', '"SamplingParams"']),
    "presence": ([(GENERATION, "optional float top_p", "float top_p")], ['"top_p"', '"SamplingParams"']),
    "value removed": ([(GENERATION, "  FINISH_REASON_LENGTH = 3;", "")], ['value "3"', '"FinishReason"']),
    "value renumbered": ([(GENERATION, "REASON_LENGTH = 3", "REASON_LENGTH = 9")], ['value "3"', '"FinishReason"']),
    "moved into a oneof": (
        [
            (SERVICE, "  string context = 1;", ""),
            (SERVICE, "    string text = 2;", "    string text = 2; string context = 1;"),
        ],
        ['"context"', '"GenerateRequest"', "oneof"],
    ),
    "oneof renamed": ([(SERVICE, "oneof event {", "oneof happening {")], ['"GenerateResponse"', '"event"']),
    "message renamed": (
        [(GENERATION, "message Progress {", "message Reading {"), (SERVICE, " Progress progress", " Reading progress")],
        ['message "Progress"'],
    ),
    "method removed": ([(SERVICE, "rpc CancelGeneration(", "rpc EndGeneration(")], ['"CancelGeneration"']),
    "type of a method": (
        [(SERVICE, "rpc Generate(GenerateRequest)", "rpc Generate(CancelGenerationRequest)")],
        ['"Generate"', '"longleaf.v1.CancelGenerationRequest"'],
    ),
    "streaming": ([(SERVICE, "(stream GenerateResponse)", "(GenerateResponse)")], ['"Generate"', "streaming"]),
    "service renamed": ([(SERVICE, "service GenerationService {", "service Making {")], ['"GenerationService"']),
    "package renamed": (
        [(CLUSTER, "package longleaf.v1;", "package longleaf.w1;")],
        ['"longleaf.v1"', '"longleaf.w1"'],
    ),
}
"""Changes of files, and words of the expected findings."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("changes", "words"), BREAKS.values(), ids=BREAKS)
def test_break_is_refused_with_its_location(
    protos: Path, changes: list[tuple[str, str, str]], words: list[str]
) -> None:
    for file, before, after in changes:
        change(protos, file, before, after)
    errors = breaks(protos)
    assert f"longleaf/v1/{changes[0][0]}:" in errors
    assert [word for word in words if word.lower() not in errors.lower()] == []


def test_additions_are_accepted(protos: Path) -> None:
    change(protos, GENERATION, "  int64 token_index = 1;", "  int64 token_index = 1;\n  string mood = 77;")
    change(protos, GENERATION, "  FINISH_REASON_LENGTH = 3;", "  FINISH_REASON_LENGTH = 3;\n  FINISH_REASON_MOOD = 77;")
    change(protos, SERVICE, "    Delta delta = 3;", "    Delta delta = 3;\n    Mood mood = 77;")
    change(protos, SERVICE, "// One event", "message Mood {}\n// One event")
    change(protos, SERVICE, "  rpc CancelG", "  rpc Sigh(Mood) returns (stream Mood);\n  rpc CancelG")
    assert breaks(protos) == ""


def test_reserved_fields_stay_reserved(protos: Path, tmp_path: Path) -> None:
    change(
        protos, GENERATION, "  int64 token_index = 1;", '  int64 token_index = 1; reserved 50 to 59; reserved "mood";'
    )
    released = tmp_path / "released.yaml"
    subprocess.run([BUF, "build", protos, "--as-file-descriptor-set", "-o", released], check=True, timeout=60)
    assert breaks(protos, released) == ""
    change(protos, GENERATION, "reserved 50 to 59;", "reserved 51 to 59;")
    change(protos, GENERATION, 'reserved "mood";', "string mood = 50;")
    errors = breaks(protos, released)
    assert '"Delta"' in errors
    assert "mood" in errors
    assert "50" in errors
