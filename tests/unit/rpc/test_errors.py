"""A request that can't be parsed is refused with INVALID_ARGUMENT, and the reason."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from baton.errors import InvalidRequest
from baton.pb import decode_pb2, inference_pb2
from baton.rpc.errors import send, send_initial_metadata, strict


def refused(data: bytes, message: Any = inference_pb2.GenerateRequest) -> str:
    """The error of bytes that are no such message."""
    decode = strict(message.FromString)
    assert decode is not None
    with pytest.raises(InvalidRequest) as caught:
        decode(data)
    return str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        inference_pb2.GenerateRequest(text="a" * 17 + "XX" + "b"),
        inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(content="fiXXe")])),
        inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(logit_bias={3: 1.0}, stop=["a", "XX"])),
    ],
)
@pytest.mark.parametrize("bad", [b"\xff\xff", b"\xc0\xaf"])
def test_a_text_that_is_not_utf8_is_the_reason(message: inference_pb2.GenerateRequest, bad: bytes) -> None:
    data = message.SerializeToString().replace(b"XX", bad)
    assert refused(data) == f"request: a text field of the message ({len(data)} bytes) is not valid UTF-8"


def test_surrogates_are_no_utf8() -> None:
    assert "is not valid UTF-8" in refused(b"\x0a\x03\xed\xa0\x80")


def test_bytes_that_are_no_message_are_refused_as_such() -> None:
    problem = refused(b"\x0a\xff", decode_pb2.SessionUp)
    assert problem.startswith("request: not a valid message (2 bytes): ")
    assert "baton.v1.SessionUp" in problem


def test_raw_bytes_stay_raw() -> None:
    assert strict(None) is None


class Gone:
    """A handler's context whose client has left."""

    async def write(self, response: Any) -> None:
        raise grpc.aio.InternalError("the client has gone")

    async def send_initial_metadata(self, metadata: Any) -> None:
        raise grpc.aio.InternalError("the client has gone")


async def test_a_handler_is_cancelled_when_its_client_has_left() -> None:
    with pytest.raises(asyncio.CancelledError):
        await send(Gone(), b"")
    with pytest.raises(asyncio.CancelledError):
        await send_initial_metadata(Gone())
