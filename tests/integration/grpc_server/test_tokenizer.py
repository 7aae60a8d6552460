"""Conversion of texts to ids and back, over real sockets."""

from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from longleaf import codec
from longleaf.errors import InvalidArgument
from longleaf.types import Tokenized
from longleaf.v1 import tokenizer_service_pb2 as tokenizer_pb
from longleaf.v1.tokenizer_service_pb2_grpc import TokenizerServiceStub
from tests.support.service import BYTES, END, TEXT, Served, ids


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> TokenizerServiceStub:
    return TokenizerServiceStub(channel)


async def tokenize(stub: TokenizerServiceStub, text: str, **options: bool) -> Tokenized:
    return codec.decode_tokenized(await stub.Tokenize(tokenizer_pb.TokenizeRequest(text=text, **options)))


async def test_text_round_trips_through_ids(stub: TokenizerServiceStub) -> None:
    found = await tokenize(stub, TEXT)
    assert (found.token_ids, found.spans) == (ids(TEXT), None)
    request = tokenizer_pb.DetokenizeRequest(token_ids={"ids": found.token_ids})
    assert (await stub.Detokenize(request)).text == TEXT


async def test_empty_text_has_no_tokens(stub: TokenizerServiceStub) -> None:
    assert await tokenize(stub, "", return_spans=True) == Tokenized((), None)
    assert (await stub.Detokenize(tokenizer_pb.DetokenizeRequest())).text == ""


async def test_spans_count_characters(stub: TokenizerServiceStub) -> None:
    found = await tokenize(stub, "aü🦙b", return_spans=True)
    assert found.spans == ((0, 1), *[(1, 2)] * 2, *[(2, 3)] * 4, (3, 4))


async def test_spans_of_a_long_text_match_its_tokens(stub: TokenizerServiceStub) -> None:
    text = "Grüße, 世界! " * 20_000
    found = await tokenize(stub, text, return_spans=True)
    assert found.spans is not None
    assert list(found.spans) == BYTES.encode(text).offsets


async def test_special_tokens_are_added_on_request_and_not_parsed_from_text(stub: TokenizerServiceStub) -> None:
    assert (await tokenize(stub, END)).token_ids == tuple(BYTES.token_to_id(letter) for letter in END)
    found = await tokenize(stub, "a", add_special_tokens=True, return_spans=True)
    assert found.token_ids == ids("a"), "this tokenizer adds none"


async def test_special_tokens_have_text_on_request(stub: TokenizerServiceStub) -> None:
    token_ids = {"ids": [*ids("a"), BYTES.token_to_id(END)]}
    plain = await stub.Detokenize(tokenizer_pb.DetokenizeRequest(token_ids=token_ids))
    shown = await stub.Detokenize(tokenizer_pb.DetokenizeRequest(token_ids=token_ids, keep_special_tokens=True))
    assert (plain.text, shown.text) == ("a", "a" + END)


async def test_long_text_is_counted(service: Served) -> None:
    text = "Grüße, 世界! " * 50_000
    assert await service.client.count_tokens(text) == len(text.encode())


async def test_bytes_are_accepted_as_text_and_not_as_ids(service: Served) -> None:
    client = service.client
    for text in (b"\xc3\xbc", bytearray(b"\xc3\xbc"), memoryview(b"\xc3\xbc")):
        assert await client.count_tokens(text) == 2
        assert (await client.tokenize(text)).token_ids == ids("ü")
        with pytest.raises(InvalidArgument, match=f"token_ids: {type(text).__name__} is not a sequence of token ids"):
            await client.detokenize(cast(Any, text))


@pytest.mark.parametrize("text", [7, None, Path("a.txt"), [5], b"\xff"], ids=str)
async def test_invalid_text_raises_an_error(service: Served, text: Any) -> None:
    for call in (service.client.count_tokens, service.client.tokenize):
        with pytest.raises(InvalidArgument) as caught:
            await call(text)
        assert caught.value.field == "text"


@pytest.mark.parametrize(
    ("token_ids", "field"),
    [("ab", "token_ids"), (7, "token_ids"), ({5: 6}, "token_ids"), ([5, True], "token_ids.ids[1]")],
    ids=str,
)
async def test_invalid_ids_raise_an_error(service: Served, token_ids: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await service.client.detokenize(token_ids)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("method", "request_", "message"),
    [
        ("Tokenize", tokenizer_pb.TokenizeRequest(text="a" * (1 << 20) + "b"), "text: has 1,048,577 bytes"),
        ("Detokenize", tokenizer_pb.DetokenizeRequest(token_ids={"ids": [1, 999]}), r"token_ids\.ids\[1\]: 999"),
        (
            "Detokenize",
            tokenizer_pb.DetokenizeRequest(token_ids={"ids": [1] * ((1 << 20) + 1)}),
            "token_ids: has 1,048,577",
        ),
    ],
)
async def test_oversized_text_is_refused(
    stub: TokenizerServiceStub, method: str, request_: object, message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await getattr(stub, method)(request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
