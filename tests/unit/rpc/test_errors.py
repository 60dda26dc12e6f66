"""A request that can't be decoded is refused by the name of its bad field."""

from typing import Any

import pytest

from baton.pb import decode_pb2, inference_pb2
from baton.rpc import errors as module
from baton.rpc.errors import Undecodable, strict

GENERATE = "/baton.v1.Inference/Generate"


def refused(data: bytes, message: Any = inference_pb2.GenerateRequest, method: str = GENERATE) -> str:
    """The error of bytes that are no such message."""
    decode = strict(message.FromString, method)
    assert decode is not None
    result = decode(data)
    assert isinstance(result, Undecodable)
    return str(result.error)


def refusal(message: inference_pb2.GenerateRequest, spoil: bytes) -> str:
    """The error of a message in which the bytes of `spoil` have turned into 0xff."""
    return refused(message.SerializeToString().replace(spoil, b"\xff" * len(spoil)))


def test_a_good_request_is_decoded() -> None:
    message = inference_pb2.GenerateRequest(text="héllo")
    decode = strict(type(message).FromString, GENERATE)
    assert decode is not None
    assert decode(message.SerializeToString()) == message


def test_the_field_and_the_byte_are_named() -> None:
    request = inference_pb2.GenerateRequest(text="a" * 17 + "X" + "b")
    assert refusal(request, b"X").startswith("text: not valid UTF-8 at byte 17")


def test_nested_and_repeated_fields_are_named() -> None:
    messages = [inference_pb2.ChatMessage(role="user", content=text) for text in ("fine", "fiXe")]
    request = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages))
    assert refusal(request, b"X").startswith("chat.messages[1].content: not valid UTF-8 at byte 2")
    request = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(stop=["a", "b", "X"]))
    assert refusal(request, b"X").startswith("sampling.stop[2]: not valid UTF-8 at byte 0")


def test_invalid_utf8_is_found_in_messages_with_maps() -> None:
    sampling = inference_pb2.SamplingParams(logit_bias={3: 1.0}, stop=["X"])
    assert refusal(inference_pb2.GenerateRequest(sampling=sampling), b"X").startswith("sampling.stop[0]")


def test_surrogates_and_overlong_forms_are_no_utf8() -> None:
    for bad in (b"\xed\xa0\x80", b"\xc0\xaf"):
        assert refused(b"\x0a" + bytes([len(bad)]) + bad).startswith("model: not valid UTF-8 at byte 0")


def test_bytes_that_are_no_message_are_refused_as_such() -> None:
    problem = refused(b"\x0a\xff", decode_pb2.SessionUp, "/baton.v1.Decode/Session")
    assert problem == "request: not a valid baton.v1.SessionUp message (2 bytes)"


def test_raw_bytes_and_unknown_services_are_left_alone() -> None:
    assert strict(None, GENERATE) is None
    assert strict(bytes, "/elsewhere.Service/Method") is bytes


def test_the_search_for_the_bad_field_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = 0

    def value(*arguments: object) -> object:
        nonlocal searched
        searched += 1
        return search(*arguments)  # type: ignore[arg-type]

    search = module._value
    monkeypatch.setattr(module, "_value", value)
    many = inference_pb2.SamplingParams(
        stop_token_ids=[1] * 9000, logit_bias=dict.fromkeys(range(9000), 1.0), stop=["a"] * 9000
    )
    request = inference_pb2.GenerateRequest(sampling=many, cache_salt="spoiled")
    assert refusal(request, b"spoiled").startswith("cache_salt: not valid UTF-8 at byte 0")
    assert searched < 5_000
    many.stop.append("spoiled")
    assert refusal(inference_pb2.GenerateRequest(sampling=many), b"spoiled").startswith("request: not a valid ")


def test_a_large_request_is_not_parsed_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "_shadow_class")
    request = inference_pb2.GenerateRequest(text="a" * 300_000 + "X")
    assert refusal(request, b"X") == "request: not a valid baton.v1.GenerateRequest message (300005 bytes)"
