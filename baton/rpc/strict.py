"""Request deserializers that report what is wrong with a request.

A proto3 string that is not UTF-8 makes protobuf refuse the whole message without naming the field, and gRPC
answers INTERNAL before any handler runs. A strict deserializer hands the handler an `Undecodable` instead,
whose error names the field. To find the field, it parses the same bytes with a shadow of the message type,
in which every string is bytes; shadows live in a descriptor pool of their own and are built when first
needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from baton.errors import InvalidRequest

Deserializer = Callable[[bytes], object]

_SHOWN_BYTES = 8
_MAX_ELEMENTS = 4096
"""Elements of a repeated field or a map that are searched; a valid request has no more."""


_SEARCHED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Takes the place of a request that could not be decoded; the handler's wrapper raises `error`."""

    error: InvalidRequest


def strict(deserializer: Deserializer | None, method: str) -> Deserializer | None:
    """`deserializer` with its failures turned into `Undecodable`; `method` is "/package.Service/Method".

    A deserializer of raw bytes (None) and a method whose service is not in the default pool stay as they are.
    """
    if deserializer is None or (descriptor := _input_type(method)) is None:
        return deserializer

    def decode(data: bytes) -> object:
        try:
            return deserializer(data)
        except DecodeError:
            return Undecodable(explain(descriptor, data))

    return decode


def utf8(message: Message, field: str) -> bytes:
    """A string field in UTF-8.

    To make a `str` of a text that is not ASCII, and bytes of this, keeps the interpreter's lock for milliseconds.
    """
    data: bytes = getattr(_shadow_class(message.DESCRIPTOR.full_name).FromString(message.SerializeToString()), field)
    return data


def explain(descriptor: Descriptor, data: bytes) -> InvalidRequest:
    """Why `data` is not a valid message: the first string that is not UTF-8, or another reason."""
    try:
        shadow = _shadow_class(descriptor.full_name).FromString(data)
    except DecodeError:
        return InvalidRequest("request", f"not a valid {descriptor.full_name} message ({len(data)} bytes)")
    for path, value in _strings(descriptor, shadow):
        try:
            value.decode("utf-8")
        except UnicodeDecodeError as error:
            seen = value[error.start : error.start + _SHOWN_BYTES]
            return InvalidRequest(path, f"not valid UTF-8 at byte {error.start}", seen)
    return InvalidRequest("request", f"not a valid {descriptor.full_name} message ({len(data)} bytes)")


def _input_type(method: str) -> Descriptor | None:
    service, _, name = method.strip("/").partition("/")
    try:
        return descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type
    except KeyError:
        return None


def _strings(descriptor: Descriptor, shadow: Message, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Path and bytes of the set strings, in the order of field numbers; the values of maps included."""
    for field, value in shadow.ListFields():
        original = descriptor.fields_by_number[field.number]
        path = f"{prefix}{field.name}"
        if original.type not in _SEARCHED:
            continue
        if original.message_type is not None and original.message_type.GetOptions().map_entry:
            entry = original.message_type.fields_by_name["value"]
            if entry.type not in _SEARCHED:
                continue
            for key, item in islice(value.items(), _MAX_ELEMENTS):
                yield from _value(entry, item, f"{path}[{key!r}]")
        elif field.is_repeated:
            for index, item in enumerate(islice(value, _MAX_ELEMENTS)):
                yield from _value(original, item, f"{path}[{index}]")
        else:
            yield from _value(original, value, path)


def _value(field: FieldDescriptor, value: object, path: str) -> Iterator[tuple[str, bytes]]:
    if field.type == FieldDescriptor.TYPE_STRING and isinstance(value, bytes):
        yield path, value
    elif field.message_type is not None and isinstance(value, Message):
        yield from _strings(field.message_type, value, f"{path}.")


@functools.cache
def _shadow_class(full_name: str) -> type[Message]:
    file = descriptor_pool.Default().FindMessageTypeByName(full_name).file
    pool = descriptor_pool.DescriptorPool()
    _add_shadow(pool, file, set())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))


def _add_shadow(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, done: set[str]) -> None:
    if file.name in done:
        return
    done.add(file.name)
    for dependency in file.dependencies:
        _add_shadow(pool, dependency, done)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        _strings_to_bytes(message)
    pool.AddSerializedFile(proto.SerializeToString())


def _strings_to_bytes(message: descriptor_pb2.DescriptorProto) -> None:
    for nested in message.nested_type:
        _strings_to_bytes(nested)
    for field in message.field:
        # Protobuf forbids bytes as the key of a map; such a key stays a string.
        if field.type == field.TYPE_STRING and not (message.options.map_entry and field.name == "key"):
            field.type = field.TYPE_BYTES
