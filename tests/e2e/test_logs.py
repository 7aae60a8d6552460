"""The log of a whole service: JSON lines without content or credentials of clients."""

import json
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from longleaf.credentials import CredentialEntry, digest_of, line_of
from tests.support import forked
from tests.support.command_line import Left, end
from tests.support.tenants import METHODS, request_of

TEXT = "Kestrelmoor"
"""Part of every text that is sent."""
CREDENTIAL = "Quillfeather-0123456789"
WRONG = "Wrenhollow-0123456789"


@dataclass
class Written:
    """The output of a service until its exit."""

    stdout: str
    stderr: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of standard error."""
        return [json.loads(line) for line in self.stderr.splitlines()]

    def of(self, logger: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["logger"] == logger]


def call(address: str, name: str, credential: str, *fields: dict[str, Any], leaves: bool = False) -> str:
    """The code of a call; with `leaves` the client disconnects after the first response."""
    method = METHODS[name]
    requests: list[Message] = [request_of(name, **each) for each in fields]
    with grpc.insecure_channel(address) as channel:
        kind = channel.stream_stream if method.client_streaming else channel.unary_stream
        stub: Any = kind(
            f"/{method.containing_service.full_name}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        given = iter(requests) if method.client_streaming else requests[0]
        stream = stub(given, metadata=(("authorization", f"Bearer {credential}"),), timeout=60)
        try:
            for _ in stream:
                if leaves:
                    stream.cancel()
        except grpc.RpcError:
            pass
        return stream.code().name


def use(address: str) -> dict[str, str]:
    """Makes calls that succeed, are cancelled, and are refused for every reason; returns their codes."""
    long = {"max_token_count": 1000, "ignore_end_token": True}
    prompt = {"text": f"who is {TEXT}?", "sampling": {"max_token_count": 4}}
    document = {"config": {"name": "contexts/book"}}, {"text": f"{TEXT} is a bird. ".encode() * 20}
    return {
        "ingest": call(address, "IngestContext", CREDENTIAL, *document),
        "ask": call(address, "Generate", CREDENTIAL, {"context": "contexts/book"} | prompt),
        "leave": call(address, "Generate", CREDENTIAL, prompt | {"sampling": long}, leaves=True),
        "count": call(address, "CountTokens", CREDENTIAL, {"text": TEXT}),
        "name": call(address, "GetContext", CREDENTIAL, {"name": f"contexts/{TEXT}"}),
        "path": call(address, "UpdateContext", CREDENTIAL, {"update_mask": {"paths": [TEXT]}}),
        "missing": call(address, "Generate", CREDENTIAL, {"context": "contexts/no"} | prompt),
        "stop": call(address, "Generate", CREDENTIAL, prompt | {"sampling": {"stop": [TEXT] * 100}}),
        "again": call(address, "IngestContext", CREDENTIAL, *document),
        "wrong": call(address, "Generate", WRONG, prompt),
        "delete": call(address, "DeleteContext", CREDENTIAL, {"name": "contexts/book"}),
    }


@pytest.fixture(scope="module")
def used(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Written]:
    """The codes of the calls, and the output of a service that has handled them and lost a rank."""
    folder = tmp_path_factory.mktemp("logs")
    (folder / "credentials").write_text(
        line_of(CredentialEntry(tenant="acme", role="admin", digests=(digest_of(CREDENTIAL),)))
    )
    options = ("--model", str(checkpoint), "--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000")
    options += ("--credentials", str(folder / "credentials"), "--log-format", "json", "--log-level", "debug")
    command = [*forked.CLI, "serve", *options, "--port", "0", "--json"]
    process = forked.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        stdout, stderr = process.stdout.readline(), ""
        assert stdout.startswith("{"), process.stderr.read()
        codes = use(json.loads(stdout)["address"])
        left = Left(process)
        ranks = [each for each in left.processes[1:] if "multiprocessing.forkserver" in " ".join(each.cmdline())]
        ranks[-1].send_signal(signal.SIGTERM)
        for line in process.stderr:
            stderr += line
            if "member 2" in line and "of epoch 3" in line:
                break
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)
        assert process.returncode == 0
        left.audit()
    finally:
        end(process)
        process.communicate()
    return codes, Written(stdout + rest[0], stderr + rest[1])


def test_calls_end_with_their_expected_codes(used: tuple[dict[str, str], Written]) -> None:
    assert used[0] == {
        "ingest": "OK",
        "ask": "OK",
        "leave": "CANCELLED",
        "count": "OK",
        "name": "INVALID_ARGUMENT",
        "path": "INVALID_ARGUMENT",
        "missing": "NOT_FOUND",
        "stop": "INVALID_ARGUMENT",
        "again": "ALREADY_EXISTS",
        "wrong": "UNAUTHENTICATED",
        "delete": "OK",
    }


def test_client_content_and_credentials_are_not_logged(used: tuple[dict[str, str], Written]) -> None:
    written = used[1].stdout + used[1].stderr
    for secret in (TEXT, CREDENTIAL, WRONG, digest_of(CREDENTIAL).hex(), digest_of(WRONG).hex(), "Bearer"):
        assert secret.lower() not in written.lower(), secret


def test_every_line_is_a_json_object_and_every_call_has_one(used: tuple[dict[str, str], Written]) -> None:
    codes, written = used
    for line in written.lines:
        assert {"ts", "level", "logger", "message"} <= set(line), line
    calls = [line["code"] for line in written.of("coordinator.auth")]
    assert sorted(calls) == sorted(codes.values())
    audited = [line["message"] for line in written.of("coordinator.audit")]
    assert audited == ["call refused", "deletion of a context"]


def test_recovery_of_a_lost_rank_is_logged_once(used: tuple[dict[str, str], Written]) -> None:
    lines = [line["message"] for line in used[1].lines if line["message"].startswith("lost member ")]
    assert len(lines) == 1, lines
    assert [line["level"] for line in used[1].of("coordinator.notes")], "notes on the start"


def test_failed_start_is_logged_in_the_configured_format(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--model", str(checkpoint), "--log-format", "json", "--launcher", "local"]
    found = forked.run([*forked.CLI, "serve", *options, "--credentials", str(tmp_path / "none")])
    (line,) = map(json.loads, found.stderr.splitlines())
    assert (found.returncode, line["level"], line["message"].partition(":")[0]) == (2, "error", "--credentials")
