"""The error messages of the web page, tested in Node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.protocol import full

PAGE = Path(__file__).parents[3] / "gateway" / "page"
LONG = (
    "body: at least 9,031 tokens do not fit in 8,192 tokens of the model's context, the length that it was trained for "
    "(only serve --allow-long goes beyond it)"
)
SCRIPT = """
import { isFinal, Refusal, sentence, Unreachable } from "%s/errors.js";
const errors = [...%s.map(([status, message]) => new Refusal(status, { message })), new Unreachable("gone")];
console.log(JSON.stringify(errors.map((error) => [isFinal(error), sentence(error)])));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_permanent_errors_suggest_no_retry() -> None:
    """Messages also do not mention service options or request fields."""
    given = [[400, LONG], [413, "too large"], [415, "kind"], [409, "busy"], [429, "full"], [503, "away"], [500, "?"]]
    script = SCRIPT % (PAGE.as_uri(), json.dumps(given))
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [is_final for is_final, _ in found] == [True, True, True, False, False, False, False, False]
    message = (
        "at least 9,031 tokens do not fit in 8,192 tokens of the model's context, the length that it was trained for."
    )
    assert found[0][1] == f"The request is invalid: {message}"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_busy_gateway_is_not_reported_as_an_unavailable_service() -> None:
    problem = full(2)
    script = f"""
    import {{ Refusal, sentence }} from "{PAGE.as_uri()}/errors.js";
    const headers = new Headers({json.dumps(problem.headers)});
    console.log(sentence(new Refusal({problem.status}, {problem.encoded().decode()}.error, headers)));
    """
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=30)
    message = "The gateway is busy: it has 2 connections, and takes no more. Try again in 1 s.\n"
    assert (done.stdout, done.stderr) == (message, "")
