"""Receives messages with a long prompt, which would hold up the event loop if the generated class read all of them.

    bytes above 256 KiB ── count the fields ── take the long ids or texts out ── the generated class parses the rest
                               └ too many: InvalidRequest     └ not found: the generated class parses everything

The generated class checks and copies a long prompt, in 5 ms for 5 MB of text, and makes an object of each field. Here
the prompt stays bytes, and is checked later on a thread (`validator.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from baton.errors import CorruptFrame, InvalidRequest
from baton.pb import inference_pb2
from baton.rpc.convert import begin_field, read_fields, split
from router.serving.validator import MAX_CHAT_MESSAGES

M = TypeVar("M", bound=Message)

_LONG_BYTES = 1 << 18
_FEW_MESSAGES = 64
_FEW_FIELDS = 4
_LONG_IDS = inference_pb2.TokenIds.LONG_IDS_FIELD_NUMBER
_MESSAGES = inference_pb2.Chat.MESSAGES_FIELD_NUMBER
_CONTENT = inference_pb2.ChatMessage.CONTENT_FIELD_NUMBER
_LIMITS = {
    "request": ("request", 1024, "fields"),
    "chat": ("chat.messages", MAX_CHAT_MESSAGES, "messages"),
    "sampling": ("sampling", 4096, "fields"),
}
"""Name of each part of a large message, and most elements. A chat has one field beside its messages."""


@dataclass(frozen=True, slots=True)
class ReceivedMessage(Generic[M]):
    """A message, and its size in bytes, which is kept because `ByteSize` serializes all of the message.

    `long_ids` are the token ids of a long prompt. `texts` are its text, or the texts of its chat, as bytes that are not
    checked yet. The message lacks these parts.
    """

    message: M
    size: int
    long_ids: Sequence[int] = ()
    texts: Sequence[bytes] = ()


def deserializer_for(kind: type[M]) -> Callable[[bytes], ReceivedMessage[M]]:
    """A deserializer for a type of message with a prompt.

    It raises InvalidRequest for too many fields, and DecodeError for bytes that are no such message.
    """
    fields = kind.DESCRIPTOR.fields_by_name
    takers = {fields[name].number: take for name, take in _TAKERS.items() if name in fields}

    def read(data: bytes) -> ReceivedMessage[M]:
        if len(data) > _LONG_BYTES:
            view = memoryview(data)
            _check_fields(kind, view)
            with contextlib.suppress(CorruptFrame, TypeError):
                rest, found = split(view, *takers)
                if len(found) == 1:
                    ((number, prompt),) = found.items()
                    kept, long_ids, texts = takers[number](prompt)
                    message = kind.FromString(b"".join((rest, begin_field(number, len(kept)), kept)))
                    return ReceivedMessage(message, len(data), long_ids, texts)
        return ReceivedMessage(kind.FromString(data), len(data))

    return read


def _check_fields(kind: type[Message], data: memoryview) -> None:
    """Refuse a message of more fields than valid ones have, before the generated class makes an object of each.

    Raises InvalidRequest, or DecodeError if `read_fields` can't read all of it, since its fields can't be counted then.
    """
    counts: Counter[str] = Counter()
    try:
        for part in _parts(kind, data):
            counts[part] += 1
            name, limit, unit = _LIMITS[part]
            if counts[part] > limit + 1:
                raise InvalidRequest(name, f"at most {limit} {unit} are allowed")
    except CorruptFrame as error:
        raise DecodeError(str(error)) from None


def _parts(kind: type[Message], data: memoryview) -> Iterator[str]:
    """The part that each field belongs to: the request, its chat, or its sampling parameters."""
    for field in read_fields(data):
        yield "request"
        known = kind.DESCRIPTOR.fields_by_number.get(field.number)
        if known is not None and known.name in _LIMITS and not isinstance(field.value, int):
            for _ in read_fields(field.value):
                yield known.name


Taken = tuple[bytes, Sequence[int], Sequence[bytes]]
"""A prompt without its ids of fixed width and its texts, these ids, and these texts."""


def _take_long_ids(token_ids: memoryview) -> Taken:
    if sys.byteorder == "big":
        raise CorruptFrame("the ids are not in the order of this machine's bytes")
    rest, found = split(token_ids, _LONG_IDS)
    return rest, found.get(_LONG_IDS, memoryview(b"")).cast("I"), ()


def _take_contents(chat: memoryview) -> Taken:
    rest, contents = list[bytes | memoryview](), []
    for index, field in enumerate(read_fields(chat)):
        if index > _FEW_MESSAGES:
            raise CorruptFrame(f"a chat of more than {_FEW_MESSAGES} messages")
        if field.number == _MESSAGES and not isinstance(field.value, int):
            message, found = split(field.value, _CONTENT, most=_FEW_FIELDS)
            rest += begin_field(_MESSAGES, len(message)), message
            contents.append(bytes(found.get(_CONTENT, b"")))
        else:
            rest.append(chat[field.begin : field.end])
    return b"".join(rest), (), contents


_TAKERS: dict[str, Callable[[memoryview], Taken]] = {
    "text": lambda text: (b"", (), [bytes(text)]),
    "token_ids": _take_long_ids,
    "chat": _take_contents,
}
"""A function for each kind of prompt that takes the long part out.

It raises CorruptFrame if the generated class must read the prompt.
"""
