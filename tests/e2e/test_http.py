"""docs/http.md: its examples run in order against a service."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.command_line import Served, url_of
from tests.support.tools import tool

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
EXAMPLES = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.extended
def test_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Served("--launcher", "local", "--http", "0", "--kv-bytes", "200000000") as service:
        url, names = url_of(service), dict[str, object]()
        for language, example in EXAMPLES:
            code = example.replace("http://localhost:8000", url)
            if language == "python":
                exec(compile(code, "docs/http.md", "exec"), names)
            else:
                tool("curl")
                result = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, check=True)
                print(result.stdout)
                if not result.stdout.startswith("{"):
                    events = [line for line in result.stdout.splitlines() if line.startswith("data: ")]
                    assert '"phase":"ready"' in events[-1], result.stdout
        names["http"].close()  # type: ignore[attr-defined]
        names["client"].close()  # type: ignore[attr-defined]
    output = capsys.readouterr().out
    assert output.count("amber falcon is 4711\n") == 2 and " tokens were held before\n" in output, output
    assert '"drop":' in output and "% of the attention: " in output and '"object":"context.text"' in output, output
    for line in ("True\n100\n204\n", '"phase":"incomplete"', '"phase":"ready"', "model_not_found"):
        assert line in output
