"""The limits of one compilation: processor time and memory. llguidance has its own limits, within which no known
constraint takes so long, so that these compilations are replaced."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.grammars.messages import CompileRequest
from coordinator.grammars.process import TOO_LARGE, TOO_LONG
from coordinator.grammars.source import grammar_of
from longleaf.types import Constraint, regex
from tests.support.service import write_model

PROCESS = """
import sys
from coordinator.grammars import process

def compile_constraint(vocabulary, constraint, plain=process.compile_constraint):
    while constraint.text == "spin":
        pass
    filled = []
    while constraint.text == "fill":
        filled.append(bytearray(16 << 20))
    return plain(vocabulary, constraint)

process.compile_constraint = compile_constraint
process.main(sys.argv[1])
"""


@pytest.mark.extended
def test_compilation_beyond_a_limit_ends_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(write_model(tmp_path))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        output = process.stdout

        def send(number: int, constraint: Constraint) -> None:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(CompileRequest(number, constraint)) + b"\n")
            process.stdin.flush()

        def receive() -> dict[str, Any]:
            return json.loads(output.readline())

        assert receive() == {"number": 0, "grammar": "", "refusal": ""}
        send(1, regex("spin"))
        send(2, regex("a+"))
        assert receive() == {"number": 2, "grammar": grammar_of(regex("a+")), "refusal": ""}
        send(3, regex("fill"))
        assert {each["number"]: each["refusal"] for each in (receive(), receive())} == {1: TOO_LONG, 3: TOO_LARGE}
        send(4, regex("b+"))
        assert receive()["refusal"] == ""
        process.stdin.close()
        assert process.wait(20) == 0
