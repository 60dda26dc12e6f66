"""Converts between proto messages and the dataclasses that the rest of the code uses.

`x_to_proto` and `x_from_proto` are inverse to each other, except that sampling parameters and logprobs are sent as
32-bit floats. The dataclasses check all values of a message, and raise InvalidRequest.

Long lists of token ids are converted as the bytes that they are on the wire: a packed field of fixed32 is its tag, its
length, and its numbers as little-endian uint32, the memory of an array. A generated class takes and gives each number
alone, and copies all of them several times, each time in one call that keeps the interpreter's lock: where the memory
is new, page faults make that 20 ms for a million. Here the bytes are copied in pieces.
"""

from __future__ import annotations

import functools
import math
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from baton.errors import CorruptFrame, InvalidRequest
from baton.kv.format import KvFormat, KvPart, Shard
from baton.pb import inference_pb2, kv_pb2, prefill_pb2
from baton.request import (
    MAX_ADDRESS_LENGTH,
    MAX_SHARDS,
    MAX_TICKET_BYTES,
    PARAMETERS,
    CachedTokens,
    CachePolicy,
    FinishReason,
    FirstToken,
    Handoff,
    PrefillProgress,
    PrefixSource,
    RemoteExport,
    SamplingParams,
    Timings,
    TokenInfo,
    Usage,
    check_count,
    check_id,
    check_length,
    check_token_ids,
    pieces,
)

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

_FINISH_TO_PROTO = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}

_CACHE_TO_PROTO = {
    CachePolicy.READ_WRITE: inference_pb2.CACHE_POLICY_READ_WRITE,
    CachePolicy.READ: inference_pb2.CACHE_POLICY_READ,
    CachePolicy.WRITE: inference_pb2.CACHE_POLICY_WRITE,
    CachePolicy.OFF: inference_pb2.CACHE_POLICY_OFF,
}
_CACHE_FROM_PROTO: dict[int, CachePolicy] = {
    inference_pb2.CACHE_POLICY_UNSPECIFIED: CachePolicy.READ_WRITE,
    **{value: key for key, value in _CACHE_TO_PROTO.items()},
}
_CACHED = tuple(field.name for field in fields(CachedTokens))

_MAY_BE_ABSENT = {field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields if field.has_presence}
_HANDED_IDS = {
    "prompt_token_ids": kv_pb2.Handoff.PROMPT_TOKEN_IDS_FIELD_NUMBER,
    "output_token_ids": kv_pb2.Handoff.OUTPUT_TOKEN_IDS_FIELD_NUMBER,
}
"""Numbers of the fields of `Handoff` with token ids."""

MAX_ESTIMATE_S = 1e9
"""A longer time left is a fault of who says it."""

_TOKEN_IDS = 2**32


def sampling_to_proto(
    params: SamplingParams, names: Collection[str] = PARAMETERS.keys()
) -> inference_pb2.SamplingParams:
    """The message with the fields in `names`; token ids and counts must fit 32 bits."""
    values = {name: getattr(params, name) for name in names}
    if "logit_bias" in values:
        values["logit_bias"] = dict(params.logit_bias)
    return inference_pb2.SamplingParams(**values)


def sampling_from_proto(
    message: inference_pb2.SamplingParams,
    vocab_size: int = _TOKEN_IDS,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    """Absent fields get the values in `defaults`, else those of SamplingParams.

    Raises InvalidRequest naming a field that is too long or out of range.
    """
    values = dict(defaults)
    for name, parameter in PARAMETERS.items():
        if name in _MAY_BE_ABSENT and not message.HasField(name):
            continue
        values[name] = getattr(message, name)
        if parameter.default == ():
            # The count is checked before any element is looked at.
            check_count(name, len(values[name]), parameter.most or vocab_size, parameter.unit)
            values[name] = tuple(values[name])
    return SamplingParams(**values | {"logit_bias": tuple(sorted(message.logit_bias.items()))})


def token_array_from_wire(name: str, data: memoryview, vocab_size: int) -> array[int]:
    """The same for the bytes of a packed field; raises CorruptFrame if they are no whole number of ids."""
    found = array("I")
    for piece in unpack_ids(data):
        for part in pieces(piece):
            check_token_ids(name, part, vocab_size, len(found))
            found.extend(part)
    return found


def token_to_proto(token: TokenInfo) -> inference_pb2.TokenInfo:
    """The message of a token."""
    if token.logprob is None and not token.top:
        return inference_pb2.TokenInfo(token_id=token.token_id)
    top = [inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top]
    return inference_pb2.TokenInfo(token_id=token.token_id, logprob=token.logprob, top=top)


def add_token(tokens: RepeatedCompositeFieldContainer[inference_pb2.TokenInfo], token: TokenInfo) -> None:
    """Append `token_to_proto(token)`; a token without log-probabilities is filled in place, which is far cheaper."""
    if token.logprob is None and not token.top:
        tokens.add(token_id=token.token_id)
    else:
        tokens.append(token_to_proto(token))


def token_from_proto(message: inference_pb2.TokenInfo) -> TokenInfo:
    """The token in a message."""
    if not message.HasField("logprob") and not message.top:
        return _plain_token(message.token_id)
    logprob = message.logprob if message.HasField("logprob") else None
    return TokenInfo(message.token_id, logprob, tuple((entry.token_id, entry.logprob) for entry in message.top))


@functools.lru_cache(maxsize=1 << 16)
def _plain_token(token_id: int) -> TokenInfo:
    # Tokens are immutable, and the same ones come again and again.
    return TokenInfo(token_id)


def finish_to_proto(reason: FinishReason | None) -> inference_pb2.FinishReason:
    """The enum value of a finish reason, which is None while the choice runs."""
    return _FINISH_TO_PROTO[reason]


def finish_from_proto(value: inference_pb2.FinishReason) -> FinishReason | None:
    """The finish reason of an enum value; None while the choice runs, and for a value of a later version."""
    return _FINISH_FROM_PROTO.get(value)


def cache_policy_to_proto(policy: CachePolicy) -> inference_pb2.CachePolicy:
    """The enum value of a cache policy."""
    return _CACHE_TO_PROTO[policy]


def cache_policy_from_proto(value: int) -> CachePolicy:
    """The cache policy of an enum value; raises InvalidRequest for an unknown one."""
    if (policy := _CACHE_FROM_PROTO.get(value)) is None:
        raise InvalidRequest("cache", f"must be one of {', '.join(each.value for each in CachePolicy)}", value)
    return policy


def cached_to_proto(cached: CachedTokens) -> inference_pb2.CachedTokens:
    """The message of cached token counts."""
    return inference_pb2.CachedTokens(**{name: getattr(cached, name) for name in _CACHED})


def cached_from_proto(message: inference_pb2.CachedTokens) -> CachedTokens:
    """The cached token counts in a message."""
    return CachedTokens(**{name: getattr(message, name) for name in _CACHED})


def first_token_to_proto(first: FirstToken) -> kv_pb2.FirstToken:
    """The message of a choice's first token."""
    return kv_pb2.FirstToken(
        choice_index=first.choice_index,
        token=token_to_proto(first.token),
        finish_reason=finish_to_proto(first.finish),
    )


def first_token_from_proto(message: kv_pb2.FirstToken) -> FirstToken:
    """The first token in a message."""
    finish = finish_from_proto(message.finish_reason)
    return FirstToken(message.choice_index, token_from_proto(message.token), finish)


def handoff_to_wire(handoff: Handoff) -> Iterator[bytes]:
    """The serialized message of a handoff, in parts."""
    message = kv_pb2.Handoff(
        request_id=handoff.request_id,
        attempt=handoff.attempt,
        sampling=sampling_to_proto(handoff.params),
        first_tokens=[first_token_to_proto(first) for first in handoff.first_tokens],
    )
    yield message.SerializeToString(deterministic=True)
    for number, ids in zip(_HANDED_IDS.values(), (handoff.prompt_ids, handoff.output_ids), strict=True):
        yield from pack_ids(number, ids)


def handoff_from_wire(data: bytes | memoryview, vocab_size: int) -> Handoff:
    """The handoff in a serialized message; raises InvalidRequest naming the first token id outside the vocabulary.

    Raises CorruptFrame or DecodeError for bytes that are no such message. On a thread it lets other threads run between
    pieces.
    """
    rest, packed = split(memoryview(data), *_HANDED_IDS.values())
    message = kv_pb2.Handoff.FromString(rest)
    prompt_ids, output_ids = (
        token_array_from_wire(name, packed.get(number, memoryview(b"")), vocab_size)
        for name, number in _HANDED_IDS.items()
    )
    return Handoff(
        request_id=message.request_id,
        attempt=message.attempt,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        params=sampling_from_proto(message.sampling),
        first_tokens=tuple(first_token_from_proto(first) for first in message.first_tokens),
    )


def shard_to_proto(shard: Shard) -> kv_pb2.Shard:
    """The message of a shard."""
    return kv_pb2.Shard(
        kv_address=shard.kv_address,
        layer_start=shard.layers.start,
        layer_end=shard.layers.stop,
        head_start=shard.heads.start,
        head_end=shard.heads.stop,
    )


def shard_from_proto(message: kv_pb2.Shard) -> Shard:
    """The shard in a message."""
    layers, heads = range(message.layer_start, message.layer_end), range(message.head_start, message.head_end)
    return Shard(message.kv_address, layers, heads)


def export_to_proto(export: RemoteExport) -> kv_pb2.RemoteExport:
    """The message of an export at another worker."""
    return kv_pb2.RemoteExport(
        transfer_id=export.transfer_id,
        incarnation=export.incarnation,
        shards=map(shard_to_proto, export.shards),
        ticket=export.ticket,
    )


def export_from_proto(field: str, message: kv_pb2.RemoteExport) -> RemoteExport:
    """The export in a message; raises InvalidRequest naming a part of `field` that is too long."""
    check_id(f"{field}.transfer_id", message.transfer_id, optional=True)
    check_id(f"{field}.incarnation", message.incarnation, optional=True)
    check_length(f"{field}.ticket", message.ticket, MAX_TICKET_BYTES)
    check_count(f"{field}.shards", len(message.shards), MAX_SHARDS, "shards")
    for shard in message.shards:
        check_length(f"{field}.shards.kv_address", shard.kv_address, MAX_ADDRESS_LENGTH)
    shards = tuple(map(shard_from_proto, message.shards))
    return RemoteExport(message.transfer_id, message.incarnation, shards, message.ticket)


def prefix_source_to_proto(source: PrefixSource) -> prefill_pb2.PrefixSource:
    """The message of a prefix source."""
    return prefill_pb2.PrefixSource(export=export_to_proto(source.export), tokens=source.tokens)


def prefix_source_from_proto(message: prefill_pb2.PrefixSource) -> PrefixSource:
    """The prefix source in a message; raises InvalidRequest as `export_from_proto` does."""
    return PrefixSource(export_from_proto("prefix_source.export", message.export), message.tokens)


def kv_format_to_proto(fmt: KvFormat) -> kv_pb2.KvFormat:
    """The message of a KV format."""
    parts = [kv_pb2.KvPartFormat(name=part.name, dtype=part.dtype, shape=part.shape) for part in fmt.parts]
    return kv_pb2.KvFormat(version=fmt.version, parts=parts, layers=fmt.layers, block_size=fmt.block_size)


def kv_format_from_proto(message: kv_pb2.KvFormat) -> KvFormat:
    """The KV format in a message."""
    parts = tuple(KvPart(part.name, part.dtype, tuple(part.shape)) for part in message.parts)
    return KvFormat(parts, message.layers, message.block_size, message.version)


def usage_to_proto(usage: Usage) -> inference_pb2.Usage:
    """The message of a request's usage."""
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        cached=cached_to_proto(usage.cached),
    )


def usage_from_proto(message: inference_pb2.Usage) -> Usage:
    """The usage in a message."""
    cached = cached_from_proto(message.cached)
    return Usage(message.prompt_tokens, message.cached_tokens, message.completion_tokens, cached)


def progress_to_proto(progress: PrefillProgress) -> inference_pb2.PrefillProgress:
    """The message of a prompt's progress."""
    return inference_pb2.PrefillProgress(
        tokens_done=progress.tokens_done,
        tokens_total=progress.tokens_total,
        tokens_per_second=progress.tokens_per_second,
        seconds_left=progress.seconds_left,
    )


def progress_from_proto(message: inference_pb2.PrefillProgress) -> PrefillProgress:
    """The progress in a message; without rate and time left if one of them is absent, not finite, or out of range."""
    done, total, rate, left = message.tokens_done, message.tokens_total, message.tokens_per_second, message.seconds_left
    known = message.HasField("seconds_left") and 0 <= left <= MAX_ESTIMATE_S and 0 <= rate < math.inf
    return PrefillProgress(done, total, rate, left) if known else PrefillProgress(done, total)


def timings_to_proto(timings: Timings) -> inference_pb2.Timings:
    """The message of a latency account, in milliseconds."""
    return inference_pb2.Timings(**{each.name: getattr(timings, each.name) for each in fields(timings)})


def timings_from_proto(message: inference_pb2.Timings) -> Timings:
    """The latency account in a message, in milliseconds."""
    return Timings(
        queue=message.queue,
        prefill=message.prefill,
        transfer=message.transfer,
        slot_wait=message.slot_wait,
        decode=message.decode,
        total=message.total,
        first_token=message.first_token,
        mean_itl=message.mean_itl,
    )


_VARINT, _BYTES = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
"""Sizes of fields by wire type."""
_MAX_VARINT_BYTES = 10
_ID_BYTES = 4
_WIRE_PIECE = 16_384
_MAX_FIELDS = 1024
"""Several times what any message here has. Each field takes a microsecond or more, so it is 2 ms of an event loop."""


def varint(value: int) -> bytes:
    """A number as in a message."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at a byte, and its end; raises CorruptFrame."""
    if at < len(data) and data[at] < 0x80:
        return data[at], at + 1
    value = shift = 0
    for at in range(at, min(at + _MAX_VARINT_BYTES, len(data))):  # noqa: B020
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise CorruptFrame("a number does not end")


def begin_field(number: int, size: int) -> bytes:
    """Tag and length that stand before the `size` bytes of a field."""
    return varint(number << 3 | _BYTES) + varint(size)


def pack_ids(number: int, ids: Sequence[int]) -> Iterator[bytes]:
    """A field of fixed32 in parts, which follow each other on the wire; nothing without ids."""
    if ids:
        yield begin_field(number, _ID_BYTES * len(ids))
    for start in range(0, len(ids), _WIRE_PIECE):
        yield _swapped(array("I", ids[start : start + _WIRE_PIECE])).tobytes()


def unpack_ids(data: memoryview) -> Iterator[array[int]]:
    """The ids of a field in pieces; raises CorruptFrame for bytes of no whole number of them."""
    if len(data) % _ID_BYTES:
        raise CorruptFrame(f"{len(data)} bytes of token ids")
    for start in range(0, len(data), _ID_BYTES * _WIRE_PIECE):
        yield _swapped(array("I", data[start : start + _ID_BYTES * _WIRE_PIECE].tobytes()))


class Field(NamedTuple):
    """A field of a message, in its bytes `begin` to `end`; fields of fixed size are read as unsigned numbers."""

    number: int
    value: int | memoryview
    begin: int
    end: int


def read_fields(data: memoryview) -> Iterator[Field]:
    """Fields of a message in their order; raises CorruptFrame for bytes that are no message."""
    at = 0
    while at < len(data):
        begin = at
        tag, at = read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = read_varint(data, at)
            yield Field(number, value, begin, at)
            continue
        if kind == _BYTES:
            size, at = read_varint(data, at)
        elif kind in _FIXED_BYTES:
            size = _FIXED_BYTES[kind]
        else:
            raise CorruptFrame(f"field {number} has wire type {kind}")
        if size > len(data) - at:
            raise CorruptFrame(f"field {number} has {len(data) - at} of {size} bytes")
        piece, at = data[at : at + size], at + size
        yield Field(number, piece if kind == _BYTES else int.from_bytes(piece, "little"), begin, at)


def split(data: memoryview, *numbers: int, most: int = _MAX_FIELDS) -> tuple[bytes, dict[int, memoryview]]:
    """A message without the fields of some numbers, and the contents of these fields.

    Raises CorruptFrame if one of them comes twice or is no field of bytes, for more than `most` fields, and for bytes
    that are no message.
    """
    rest, found, kept = [], dict[int, memoryview](), 0
    for count, field in enumerate(read_fields(data), 1):
        if count > most:
            raise CorruptFrame(f"a message of more than {most} fields")
        if field.number in numbers:
            if isinstance(field.value, int) or field.number in found:
                raise CorruptFrame(f"field {field.number} comes twice, or is no field of bytes")
            found[field.number] = field.value
            rest.append(data[kept : field.begin])
            kept = field.end
    return b"".join((*rest, data[kept:])), found


def _swapped(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
