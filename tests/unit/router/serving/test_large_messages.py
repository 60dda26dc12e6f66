"""A large message must not hold up the event loop: fields are counted before they are read, and read on threads."""

import asyncio
import contextlib
import re
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
from google.protobuf.descriptor import Descriptor

import router.request_runner
import router.serving.large_messages
import router.serving.servicer
import router.serving.validator
from baton.errors import InvalidRequest
from baton.pb import inference_pb2 as pb
from baton.request import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, checked_array, checked_ids
from baton.rpc.channel import CONTROL_MESSAGE_BYTES
from baton.rpc.convert import begin_field, read_fields, varint
from baton.rpc.errors import strict, utf8_pieces
from baton.tokenizer import Tokenizer
from router.request import TokenPrompt
from router.serving.front_door import ANONYMOUS
from router.serving.large_messages import ReceivedMessage, deserializer_for
from router.serving.servicer import InferenceServicer, generate_request, tokenize_prompt
from router.serving.threads import TenantThreads
from router.serving.tokenizer_processes import LONG_TEXT, TokenizerProcesses
from router.serving.validator import MAX_CHAT_MESSAGES, RequestValidator, ServedModel
from tests.integration.router_rig import router_rig
from tests.unread import COUNT, WithUnread

VOCAB, LENGTH = 30_000, 1_000_000
CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
IDS = pb.TokenIds(ids=[1])
LONG = pb.GenerateRequest(token_ids=pb.TokenIds())
REQUESTS: dict[str, tuple[Any, ...]] = {
    "Generate": (pb.GenerateRequest(token_ids=IDS), pb.GenerateRequest(chat=CHAT)),
    "Tokenize": (pb.TokenizeRequest(chat=CHAT),),
    "Detokenize": (pb.DetokenizeRequest(token_ids=[1]),),
}
LIMITS = {
    "token_ids.ids": ("token_ids", LENGTH),
    "token_ids.long_ids": ("token_ids", LENGTH),
    "token_ids": ("token_ids", LENGTH),
    "chat.messages": ("chat.messages", MAX_CHAT_MESSAGES),
    "sampling.stop": ("stop", MAX_STOP_STRINGS),
    "sampling.stop_token_ids": ("stop_token_ids", MAX_STOP_TOKEN_IDS),
    "sampling.logit_bias": ("logit_bias", MAX_LOGIT_BIAS),
    "sampling.allowed_token_ids": ("allowed_token_ids", VOCAB),
}


def repeated(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """Paths of all repeated fields and maps."""
    for field in message.fields:
        if field.is_repeated:
            yield prefix + field.name
        elif field.message_type is not None:
            yield from repeated(field.message_type, f"{prefix}{field.name}.")


CASES = [
    (method, path, LONG if path.endswith("long_ids") else messages[path.startswith("chat.") and len(messages) > 1])
    for method, messages in REQUESTS.items()
    for path in repeated(messages[0].DESCRIPTOR)
]


def validator() -> RequestValidator:
    return RequestValidator(ServedModel("m", VOCAB, (), cast(Tokenizer, object())), lambda: LENGTH, TenantThreads(1))


@pytest.mark.parametrize(("method", "path", "made"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES])
async def test_a_field_is_counted_before_any_of_it_is_read(method: str, path: str, made: Any) -> None:
    message = WithUnread(made, path)
    calls: dict[str, Callable[[Any], Any]] = {
        "Generate": lambda message: validator().validate(
            generate_request(ReceivedMessage(message, 1)), arrived=0.0, deadline=60.0
        ),
        "Tokenize": lambda message: validator().tokenize(tokenize_prompt(ReceivedMessage(message, 1)), 1),
        "Detokenize": lambda message: validator().detokenize(message.token_ids),
    }
    field, limit = LIMITS[path]
    with pytest.raises(InvalidRequest, match=rf"^{field}: at most {limit} .*, got {COUNT}$"):
        await calls[method](message)


def noted(function: Any, seen: list[bool]) -> Any:
    """`function`, and whether each call of it was on the thread of the event loop."""

    def call(*arguments: Any, **named: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return function(*arguments, **named)

    return call


@pytest.mark.parametrize("count", [2, 20_000])
async def test_large_fields_are_converted_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seen: list[bool] = []
    for module, name in (
        (router.serving.validator, "checked_array"),
        (router.serving.servicer, "sampling_from_proto"),
    ):
        monkeypatch.setattr(module, name, noted(getattr(module, name), seen))
    ids = range(count)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(allowed_token_ids=ids))
    request = await validator().validate(generate_request(ReceivedMessage(message, 1)), arrived=0.0, deadline=60.0)
    assert (list(request.prompt_ids), request.params.allowed_token_ids) == (list(ids), tuple(ids))
    assert seen == [count == 2] * 2


@pytest.mark.parametrize(("length", "where"), [(2, "the loop"), (20_000, "a thread"), (LONG_TEXT, "a process")])
async def test_a_long_text_leaves_the_event_loop_and_a_very_long_one_the_process(length: int, where: str) -> None:
    seen: list[bool] = []
    ids: dict[str, int] = {"the loop": 1, "a thread": 1, "a process": 2}

    class Stub:
        check_size = staticmethod(noted(lambda field, size, limit: None, seen))
        encode = staticmethod(noted(lambda text, add_special_tokens: [1, len(text)], seen))

    class Processes:
        encode = staticmethod(noted(lambda text, add_special_tokens: [2, len(text)], seen))

    model = ServedModel("m", VOCAB, (), cast(Tokenizer, Stub()), cast(TokenizerProcesses, Processes()))
    checked = RequestValidator(model, lambda: LENGTH, TenantThreads(1))
    message = pb.GenerateRequest(text="x" * length)
    request = await checked.validate(generate_request(ReceivedMessage(message, length)), arrived=0, deadline=60.0)
    assert list(request.prompt_ids) == [ids[where], length]
    assert seen == [where == "the loop"] * 2


def test_the_size_of_a_request_is_that_of_its_bytes() -> None:
    """`ByteSize` would serialize all of it again: 6 ms for a million token ids."""
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1000)))
    data = message.SerializeToString()
    assert deserializer_for(pb.GenerateRequest)(data) == ReceivedMessage(message, len(data))
    assert generate_request(ReceivedMessage(WithUnread(message, "token_ids.ids"), len(data))).size == len(data)


class Pieces(Sequence[int]):
    """Token ids that note how many are asked for at a time."""

    def __init__(self, count: int) -> None:
        self.ids, self.asked = range(count), list[int]()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: Any) -> Any:
        found = self.ids[key]
        self.asked.append(len(found) if isinstance(key, slice) else 1)
        return list(found) if isinstance(key, slice) else found

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all are read by one call, which holds the GIL")


def test_token_ids_are_converted_in_pieces_and_the_first_bad_one_is_named() -> None:
    ids = Pieces(100_000)
    assert checked_ids("ids", ids, 100_000) == list(range(100_000))
    assert checked_array("ids", ids, 100_000) == array("I", range(100_000))
    assert max(ids.asked) < 5000
    with pytest.raises(InvalidRequest, match=r"^ids\[70000\]: must be in \[0, 70000\), got 70000$"):
        checked_ids("ids", Pieces(100_000), 70_000)


async def test_the_answer_of_tokenize_is_serialized_in_turns_of_the_event_loop() -> None:
    ids, turns, writing = Pieces(100_000), [0], MagicMock(write=AsyncMock(), send_initial_metadata=AsyncMock())

    async def answers() -> AsyncIterator[Pieces]:
        yield ids

    def turn() -> None:
        turns[0] += 1
        turning.append(asyncio.get_running_loop().call_soon(turn))

    turning: list[asyncio.Handle] = []
    turn()
    door = Mock(tokenize=Mock(return_value=contextlib.nullcontext(answers())))
    await InferenceServicer(door).Tokenize(ReceivedMessage(pb.TokenizeRequest(text="x"), 1), ANONYMOUS, writing)
    turning[-1].cancel()
    (answer,) = writing.write.call_args.args
    assert list(pb.TokenizeResponse.FromString(answer).token_ids) == list(range(100_000))
    assert max(ids.asked) < 5000
    assert turns[0] >= len(ids.asked)


def read(message: pb.GenerateRequest) -> tuple[list[int], str, bool]:
    """The ids of a message as it is received, its model, and whether the ids were left where they were."""
    sent = deserializer_for(pb.GenerateRequest)(message.SerializeToString())
    request = generate_request(sent)
    assert isinstance(request.prompt, TokenPrompt)
    ids = checked_array("token_ids", request.prompt.token_ids, 2**32)
    return list(ids), request.model, not sent.message.token_ids.long_ids


def test_the_ids_of_a_long_prompt_are_not_copied_on_the_event_loop() -> None:
    ids = [2**32 - 1, *range(100_000)]
    message = pb.GenerateRequest(model="m", token_ids=pb.TokenIds(long_ids=ids))
    assert read(message) == (ids, "m", True)
    message.token_ids.ids.append(1)
    with pytest.raises(InvalidRequest, match="can't both be set"):
        read(message)
    assert read(pb.GenerateRequest(model="m", token_ids=pb.TokenIds(long_ids=ids[:9]))) == (ids[:9], "m", False)


LONG_TEXTS = ["größe 日本 " * 20_000 + "X", "y" * 100_000]
CHATTED = [pb.ChatMessage(role="user", content=text) for text in LONG_TEXTS]


def received(message: Any) -> Any:
    """The prompt of a message as it is received; X arrives as a byte that is not UTF-8."""
    data = message.SerializeToString().replace(b"X", b"\xff")
    if isinstance(message, pb.TokenizeRequest):
        sent = deserializer_for(pb.TokenizeRequest)(data)
        return tokenize_prompt(sent), sent
    sent = deserializer_for(pb.GenerateRequest)(data)
    return generate_request(sent).prompt, sent


@pytest.mark.parametrize("kind", [pb.GenerateRequest, pb.TokenizeRequest])
def test_long_texts_are_not_checked_on_the_event_loop(kind: Any) -> None:
    for message in (kind(text=LONG_TEXTS[0], model="m"), kind(chat=pb.Chat(messages=CHATTED), model="m")):
        prompt, sent = received(message)
        assert sent.message.ByteSize() < 100
        assert (sent.message.model, sent.size) == ("m", message.ByteSize())
        path = "text" if message.HasField("text") else r"chat\.messages\[0\]\.content"
        with pytest.raises(InvalidRequest, match=rf"^{path}: not valid UTF-8 at byte 300000, got"):
            prompt.read()


def test_long_texts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def measured(path: str, data: bytes) -> Iterator[str]:
        for piece in utf8_pieces(path, data):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(router.serving.servicer, "utf8_pieces", measured)
    good, other = LONG_TEXTS[0][:-1], LONG_TEXTS[1]
    prompt, _ = received(pb.TokenizeRequest(text=good))
    assert prompt.read() == good.encode()
    assert (sum(sizes), max(sizes) <= 64 << 10) == (len(good), True)
    sizes.clear()
    many = [pb.ChatMessage(role="user", content=text) for text in (good, *[other] * 9)]
    for count in (len(many), 100):
        prompt, sent = received(pb.GenerateRequest(chat=pb.Chat(messages=(many * count)[:count])))
        assert len(sent.texts) == (count if count < 64 else 0)
        assert [each["content"] for each in prompt.read()][:2] == [good, other]
        assert (sum(sizes), max(sizes, default=0) <= 64 << 10) == (
            len(good) + 9 * len(other) if sent.texts else 0,
            True,
        )
        sizes.clear()


@pytest.mark.parametrize("large", [2, 1000])
async def test_a_long_prompt_is_made_off_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(router.request_runner, "LARGE_REQUEST", large, raising=False)
    monkeypatch.setattr(router.request_runner, "prefill_message", noted(router.request_runner.prefill_message, seen))
    async with router_rig(tmp_path) as b:
        await b.answer(max_tokens=1)
        assert len(b.prefill[0].requests[0].prompt_token_ids) == 3
    assert seen == [large == 1000]


def test_the_largest_request_holds_the_longest_prompt_and_is_bounded() -> None:
    length, vocab = 262_144, 152_000
    ids = [vocab - 1] * vocab
    prompt = pb.TokenIds(ids=[vocab - 1] * length)
    stops = ["\U0001f600" * 1024] * MAX_STOP_STRINGS
    bias = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    sampling = pb.SamplingParams(allowed_token_ids=ids, stop=stops, logit_bias=bias)
    largest = router.serving.validator.largest_request(length, vocab)
    assert pb.GenerateRequest(token_ids=prompt, sampling=sampling).ByteSize() <= largest < 8 << 20
    assert router.serving.validator.largest_request(64, 300) == 4 << 20
    assert (
        router.serving.validator.largest_request(10**9, vocab)
        == router.serving.validator.MAX_REQUEST_BYTES
        == CONTROL_MESSAGE_BYTES
    )


def test_ids_that_are_a_field_each_are_read_by_the_generated_class() -> None:
    """A caller may send as many fields as a message has bytes, and each would be looked at on the event loop."""
    ids = [1, 2, 300] * 50_000
    unpacked = b"".join(b"\x08" + varint(token) for token in ids)
    sent = deserializer_for(pb.GenerateRequest)(
        begin_field(pb.GenerateRequest.TOKEN_IDS_FIELD_NUMBER, len(unpacked)) + unpacked
    )
    assert not sent.long_ids
    assert list(sent.message.token_ids.ids) == ids


CHAT_FIELD, SAMPLING_FIELD = pb.GenerateRequest.CHAT_FIELD_NUMBER, pb.GenerateRequest.SAMPLING_FIELD_NUMBER
EMPTY = begin_field(pb.Chat.MESSAGES_FIELD_NUMBER, 0)
EMPTY_STOP = begin_field(pb.SamplingParams.STOP_FIELD_NUMBER, 0)
UNKNOWN_GROUP = b"\xfb\x07\xfc\x07"


def field(number: int, content: bytes) -> bytes:
    return begin_field(number, len(content)) + content


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (field(CHAT_FIELD, EMPTY * 200_000), f"chat.messages: at most {MAX_CHAT_MESSAGES} messages are allowed"),
        (field(CHAT_FIELD, EMPTY * 500) * 400, f"chat.messages: at most {MAX_CHAT_MESSAGES} messages are allowed"),
        (field(SAMPLING_FIELD, EMPTY_STOP * 200_000), "sampling: at most 4096 fields are allowed"),
        (field(SAMPLING_FIELD, b"") * 200_000, "request: at most 1024 fields are allowed"),
        (field(CHAT_FIELD, UNKNOWN_GROUP + EMPTY * 200_000), "request: not a valid message ("),
    ],
)
def test_too_many_fields_are_refused_before_an_object_is_made_of_each(
    monkeypatch: pytest.MonkeyPatch, data: bytes, problem: str
) -> None:
    looked_at = 0

    def counted(*arguments: Any) -> Iterator[Any]:
        nonlocal looked_at
        for each in read_fields(*arguments):
            looked_at += 1
            yield each

    monkeypatch.setattr(router.serving.large_messages, "read_fields", counted)
    # A kind of message that can't be parsed.
    decode = strict(deserializer_for(cast(Any, Mock(DESCRIPTOR=pb.GenerateRequest.DESCRIPTOR))))
    assert decode is not None
    with pytest.raises(InvalidRequest, match=f"^{re.escape(problem)}"):
        decode(data)
    assert looked_at < 5000


def test_messages_of_many_fields_are_read_by_the_generated_class() -> None:
    """Each takes a microsecond or more, and a message of a chat may have as many as bytes."""
    roles = field(pb.ChatMessage.ROLE_FIELD_NUMBER, b"user") * 1000
    message = field(pb.Chat.MESSAGES_FIELD_NUMBER, roles + field(pb.ChatMessage.CONTENT_FIELD_NUMBER, b"x" * 9000))
    sent = deserializer_for(pb.GenerateRequest)(field(CHAT_FIELD, message * 60))
    assert not sent.texts
    assert [len(each.content) for each in sent.message.chat.messages] == [9000] * 60
