"""Messages that are valid protobuf and make no sense."""

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_INTEGERS = (0, 0, 1, 1, 2, 3, 7, 15, 16, 100, 1000, 4096, 2**31 - 1, 2**31, 2**32 - 1)
_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
_STRINGS = ("", "a", "default", "x" * 300, "a/b", "\0", "127.0.0.1:1", ":1", "nonsense", "\u202e", "🎵" * 20)
_DEPTH = 4


def senseless(rng: random.Random, message: M, names: Sequence[str] = (), filled: float = 0.6) -> M:
    """Set each field of `message` with that probability to something; strings and bytes also from `names`."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < filled:
            message.ClearField(field.name)
            _set(rng, message, field, names, _DEPTH)
    return message


def one_wrong(rng: random.Random, message: M, names: Sequence[str] = ()) -> M:
    """A copy with one field, perhaps a nested one, set to something else."""
    copy = type(message)()
    copy.CopyFrom(message)
    where: Any = copy
    while where.DESCRIPTOR.fields:
        field = rng.choice(where.DESCRIPTOR.fields)
        nested = field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated
        if nested and rng.random() < 0.8:
            where = getattr(where, field.name)
            continue
        where.ClearField(field.name)
        _set(rng, where, field, names, _DEPTH)
        break
    return copy


def _set(rng: random.Random, message: Any, field: FieldDescriptor, names: Sequence[str], depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(rng.randrange(4)):
            getattr(message, field.name)[rng.choice(_INTEGERS)] = rng.choice(_FLOATS)
    elif field.is_repeated:
        values = getattr(message, field.name)
        for _ in range(rng.choice((0, 1, 2, 3, 40))):
            if field.message_type is not None:
                _fill(rng, values.add(), names, depth - 1)
            else:
                values.append(_scalar(rng, field, names))
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        _fill(rng, getattr(message, field.name), names, depth - 1)
    else:
        setattr(message, field.name, _scalar(rng, field, names))


def _fill(rng: random.Random, message: Any, names: Sequence[str], depth: int) -> None:
    for field in message.DESCRIPTOR.fields if depth else ():
        if rng.random() < 0.5:
            _set(rng, message, field, names, depth)


def _scalar(rng: random.Random, field: FieldDescriptor, names: Sequence[str]) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = rng.choice((*_STRINGS, *names))
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 99))
        case FieldDescriptor.CPPTYPE_INT64 | FieldDescriptor.CPPTYPE_UINT64:
            return rng.choice((*_INTEGERS, 2**63 - 1))
        case _:
            return rng.choice(_INTEGERS[:-3] if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 else _INTEGERS)
