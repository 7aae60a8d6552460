"""docs/api.md: its examples run in order against a service, and it covers the whole API."""

import doctest
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from generate_reference import PAGE, page, read
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from tests.support.command_line import Served
from tests.support.fuzz.messages import methods

API = Path(__file__).parents[2] / "docs" / "api.md"
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^### (\w+\.\w+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`longleaf serve` with the embedded model."""
    data = str(tmp_path_factory.mktemp("data"))
    with Served("--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000", "--data-dir", data) as service:
        yield service
        assert service.stop() == 0


def test_examples_run(embedded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLEAF_SERVER", embedded.address)
    reported: list[str] = []
    runner = doctest.DocTestRunner()
    names: dict[str, Any] = {}
    text = API.read_text()
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        if block["language"] == "python":
            example = doctest.DocTestParser().get_doctest(block["body"], names, "api.md", str(API), line)
            assert example.examples, f"line {line} has no example"
            runner.run(example, out=reported.append, clear_globs=False)
            names = example.globs
        else:
            call_as_grpcurl(block["body"], embedded.address)
    assert runner.summarize(verbose=False).failed == 0, "".join(reported)


def call_as_grpcurl(command: str, address: str) -> None:
    """Makes the call of a grpcurl command line, which is not installed here, with JSON in and out."""
    program, *options, _, path = shlex.split(command)
    assert (program, options[0]) == ("grpcurl", "-plaintext")
    method = next(method for method in methods() if f"{method.containing_service.full_name}/{method.name}" == path)
    given = options[options.index("-d") + 1] if "-d" in options else "{}"
    request = json_format.Parse(given, GetMessageClass(method.input_type)())
    with grpc.insecure_channel(address) as channel:
        response = GetMessageClass(method.output_type).FromString
        if method.server_streaming:
            answers = channel.unary_stream(f"/{path}", serialized, response)(request, timeout=60)
            assert [json_format.MessageToJson(answer) for answer in answers]
        else:
            answer = channel.unary_unary(f"/{path}", serialized, response)(request, timeout=60)
            assert json_format.MessageToJson(answer)


def serialized(message: Any) -> bytes:
    return message.SerializeToString()


def test_every_method_has_a_section_with_an_example() -> None:
    _, *parts = HEADING.split(API.read_text())
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert sorted(sections) == sorted(map(title, methods()))
    assert [name for name, text in sections.items() if "```python" not in text] == []


def title(method: MethodDescriptor) -> str:
    return f"{method.containing_service.name}.{method.name}"


def test_links_lead_to_messages() -> None:
    known = {heading.lower() for heading in re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)}
    linked = re.findall(r"\]\((?:messages\.md)?#(\w+)\)", API.read_text() + PAGE.read_text())
    assert linked
    assert set(linked) <= known


@pytest.mark.slow
def test_message_reference_is_current() -> None:
    """`make check` checks this as well."""
    assert PAGE.read_text() == page(read()), "run `make proto`"
