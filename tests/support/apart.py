"""Scripts of calls of tenants, and their responses without the parts that differ from run to run."""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from grpc import StatusCode
from hypothesis import strategies as st

from tests.support.tenants import Caller, request_of

Step = tuple[str, list[dict[str, Any]]]
NAMES = ("book", "play")
TEXTS = ("call me ishmael, some years ago", "call me ishmael, never mind how long", "it was the best of times")
NAME = st.sampled_from(NAMES).map(lambda name: f"contexts/{name}")
WRONG = st.sampled_from(["contexts/acme/book", "contexts/bolt/play", "acme/book", "contexts/..", "contexts/bücher", ""])
"""Names that do not exist, and that might lead to another tenant's."""
SAMPLING = {"max_token_count": 5, "seed": 1}
TEXT = st.sampled_from(TEXTS)
PRIORITY = st.sampled_from([-100, 0, 100])
REQUEST = st.sampled_from(["one", "two"])
HIDDEN = ("Time", "time", "Timings", "Duration", "duration", "seed", "decode", "tokensPerSecond", "positions")
"""Parts of fields that differ from run to run."""


def generate(name: str | None, text: str, request_id: str, priority: int = 0) -> Step:
    fields: dict[str, Any] = {"text": text, "sampling": SAMPLING, "request_id": request_id, "priority": priority}
    if name is not None:
        fields["context"] = name
    return "Generate", [fields | {"resume_duration": {"seconds": 60}}]


def ingest(name: str, text: str, append: bool = False, priority: int = 0) -> Step:
    config = {"name": name, "append": append, "priority": priority}
    return "IngestContext", [{"config": config}, {"text": text.encode()}]


STEPS = st.one_of(
    st.builds(ingest, NAME, TEXT, st.booleans(), PRIORITY),
    st.builds(generate, st.none() | NAME, TEXT, REQUEST, PRIORITY),
    st.builds(lambda r: ("CancelGeneration", [{"request_id": r}]), REQUEST),
    st.builds(lambda r: ("Generate", [{"request_id": r, "resume_token_index": 0}]), REQUEST),
    st.builds(lambda n: ("GetContext", [{"name": n}]), NAME),
    st.builds(lambda n: ("DeleteContext", [{"name": n}]), NAME),
    st.builds(lambda n, m: ("ForkContext", [{"name": n, "new_name": m}]), NAME, NAME),
    st.builds(lambda n: ("ExportContext", [{"name": n}]), NAME | WRONG),
    st.builds(lambda n: ("RecomputeContext", [{"name": n}]), NAME | WRONG),
    st.builds(lambda n, call: (call, [{"name": n}]), WRONG, st.sampled_from(["GetContext", "DeleteContext"])),
    st.builds(lambda n, m: ("ForkContext", [{"name": n, "new_name": m}]), WRONG, NAME),
    st.just(("ListContexts", [{}])),
    st.just(("GetCluster", [{}])),
)
SCRIPT = st.lists(STEPS, min_size=1, max_size=8)
Responses = list[tuple[str, StatusCode, list[Any], str]]


def _plain(value: Any) -> Any:
    """The value without the parts that differ from run to run."""
    if isinstance(value, dict):
        found = {key: _plain(each) for key, each in value.items() if not any(word in key for word in HIDDEN)}
        return {key: each for key, each in found.items() if each not in ({}, [])}
    return [_plain(each) for each in value] if isinstance(value, list) else value


async def play(address: str, tenant: str, script: Sequence[Step]) -> Responses:
    """The responses to the tenant's script."""
    output: Responses = []
    async with grpc.aio.insecure_channel(address) as channel:
        caller = Caller(channel, tenant)
        for name, requests in script:
            code, responses, details = await caller.call(name, [request_of(name, **fields) for fields in requests])
            found = [_plain(MessageToDict(response)) for response in responses]
            if name in ("Generate", "IngestContext"):
                found = [*_joined(_steady(found)), {"totals": _totals(found)}]
            output.append((name, code, found, details))
    return output


def _steady(found: list[Any]) -> list[Any]:
    """Removes progress, whose chunks depend on steps, and the wait for admission. A tenant sends one request at a time,
    so it is at most the next in the queue, however many others wait, and gets `started` again on admission.
    """
    reported = [each for each in found if each and (not {"progress", "phase"} & set(each) or "context" in each)]
    places = [each["started"].pop("queuePosition", 0) for each in reported if "started" in each]
    assert set(places) <= {0, 1}, places
    started = [i for i, each in enumerate(reported) if "started" in each]
    return [each for i, each in enumerate(reported) if i not in started[:-1]]


def _totals(found: list[Any]) -> list[int]:
    """All totals that progress events reported."""
    reported = [each.get("progress", each) for each in found]
    return sorted({int(each["totalTokenCount"]) for each in reported if "totalTokenCount" in each})


def _joined(found: list[Any]) -> list[Any]:
    """Joins the tokens and the text of deltas: a slow reader gets several tokens in one event."""
    deltas = [each["delta"] for each in found if "delta" in each]
    if not deltas:
        return found
    token_ids = [token_id for delta in deltas for token_id in delta.get("tokenIds", [])]
    rest = [each for each in found if "delta" not in each]
    return [*rest, {"tokenIds": token_ids, "text": "".join(delta.get("text", "") for delta in deltas)}]
