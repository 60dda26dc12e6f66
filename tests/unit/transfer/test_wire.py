"""The codec: compatible with the generated class both ways, and strict with what contradicts itself."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import CorruptFrame, TransferError
from baton.kv.format import DTYPE_BYTES, PartData, Shard
from baton.pb import kv_pb2
from baton.transfer import wire
from tests.unit.transfer.support import WHOLE

UINT32 = st.integers(0, 2**32 - 1)


@st.composite
def data_frames(draw: st.DrawFn) -> tuple[int, range, range, list[PartData]]:
    tokens, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    token, head = draw(st.integers(0, 2**31)), draw(st.integers(0, 300))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        name, dtype = draw(st.text(min_size=1, max_size=4)), draw(st.sampled_from(sorted(DTYPE_BYTES)))
        shape = (tokens, heads, *draw(st.lists(st.integers(1, 4), max_size=2)))
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        parts.append(PartData(name, dtype, shape, draw(st.binary(min_size=size, max_size=size))))
    return draw(UINT32), range(token, token + tokens), range(head, head + heads), parts


def as_message(layer: int, tokens: range, heads: range, parts: list[PartData], checksum: int) -> kv_pb2.KvFrame:
    described = [
        kv_pb2.KvPart(name=part.name, dtype=part.dtype, shape=part.shape, length=len(part.data)) for part in parts
    ]
    header = kv_pb2.KvHeader(
        layer=layer,
        token_start=tokens.start,
        token_count=len(tokens),
        head_start=heads.start,
        head_count=len(heads),
        parts=described,
        checksum=checksum,
    )
    return kv_pb2.KvFrame(header=header, payload=b"".join(bytes(part.data) for part in parts))


def small_frame() -> bytes:
    parts = [PartData(name, "float16", (3, 2, 2), bytes(range(24))) for name in ("k", "v")]
    return wire.encode_data(5, range(300, 303), range(2, 4), parts)[0]


@given(data_frames())
def test_data_frames_are_what_the_generated_class_makes(content: tuple[int, range, range, list[PartData]]) -> None:
    layer, tokens, heads, parts = content
    frame, checksum = wire.encode_data(layer, tokens, heads, parts)
    message = as_message(layer, tokens, heads, parts, checksum)
    assert kv_pb2.KvFrame.FromString(frame) == message
    assert message.SerializeToString() == frame
    assert wire.decode(frame) == wire.KvData(layer, tokens, heads, tuple(parts), checksum)


SPANS = st.tuples(UINT32, UINT32).map(lambda bounds: range(*bounds))
SHARDS = st.builds(Shard, st.just(""), SPANS, SPANS)


@given(UINT32, st.lists(st.tuples(UINT32, UINT32, UINT32), max_size=4), UINT32, SHARDS)
def test_manifests_are_read_as_they_are_made(frames: int, runs: list[wire.TokenRun], digest: int, shard: Shard) -> None:
    manifest = wire.Manifest(frames, tuple(runs), digest, shard)
    assert wire.decode(wire.encode_manifest(manifest)) == manifest


@given(UINT32, UINT32, st.lists(SHARDS, max_size=3), st.binary(min_size=1))
def test_commits_are_read_as_they_were_made(length: int, version: int, shards: list[Shard], handoff: bytes) -> None:
    frame = wire.encode_commit(length, handoff, shards, version)
    assert kv_pb2.KvFrame.FromString(frame).SerializeToString(deterministic=True) == frame
    assert wire.decode(frame) == wire.Commit(length, version, handoff, tuple(shards))


@given(UINT32, st.binary())
def test_a_commit_that_hands_nothing_over_names_its_prefix(length: int, name: bytes) -> None:
    frame = wire.encode_commit(length, None, (WHOLE,), prefix_digest=name)
    assert wire.decode(frame) == wire.Commit(length, 0, None, (WHOLE,), name)


def test_a_checksum_of_zero_is_sent_all_the_same() -> None:
    message = as_message(0, range(1), range(1), [PartData("k", "float16", (1, 1), b"ab")], 0)
    assert message.SerializeToString()[: -len(b"\x12\x02ab")].endswith(b"\x3d\0\0\0\0")


@pytest.mark.parametrize("extra", [b"\x48\x01", b"\x18\x00", b"\x08\x03"])
def test_a_manifest_with_anything_more_is_refused(extra: bytes) -> None:
    body = b"\x08\x03\x22\x00" + extra
    with pytest.raises(CorruptFrame):
        wire.decode(b"\x1a" + bytes((len(body),)) + body)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"token_count": 0}, "0 tokens"), ({"head_count": 3}, "shape"), ({"parts": []}, "0 parts")],
)
def test_a_header_that_contradicts_itself_is_refused(change: dict[str, object], complaint: str) -> None:
    header = kv_pb2.KvFrame.FromString(small_frame()).header
    fields = {field.name: value for field, value in header.ListFields() if field.name != "checksum"}
    _refused_with(kv_pb2.KvHeader(**(fields | change)), complaint)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"shape": [3, 2, 3]}, "bytes for"),
        ({"shape": [3, 2, 2] + [1] * 100}, "description of"),
        ({"length": 23}, "23 bytes"),
        ({"length": 2**40}, "bytes for"),
    ],
)
def test_a_part_that_contradicts_the_payload_is_refused(change: dict[str, object], complaint: str) -> None:
    header = kv_pb2.KvFrame.FromString(small_frame()).header
    header.ClearField("checksum")
    part = {field.name: value for field, value in header.parts[1].ListFields()} | change
    header.parts[1].CopyFrom(kv_pb2.KvPart(**part))
    _refused_with(header, complaint)


def test_an_element_type_that_is_not_known_is_refused_by_name() -> None:
    header = kv_pb2.KvFrame.FromString(small_frame()).header
    header.ClearField("checksum")
    header.parts[1].dtype = "float4_e2m1"
    _refused_with(header, "part 'v' has the unknown dtype 'float4_e2m1'", TransferError)


def _refused_with(header: kv_pb2.KvHeader, complaint: str, error: type[TransferError] = CorruptFrame) -> None:
    payload = kv_pb2.KvFrame.FromString(small_frame()).payload
    header.checksum = wire.crc32c.crc32c(payload, wire.crc32c.crc32c(header.SerializeToString()))
    with pytest.raises(error, match=complaint):
        wire.decode(kv_pb2.KvFrame(header=header, payload=payload).SerializeToString())


def test_reading_does_not_copy_the_payload() -> None:
    frame = small_frame()
    data = wire.decode(frame)
    assert isinstance(data, wire.KvData)
    assert all(isinstance(part.data, memoryview) and part.data.obj is frame for part in data.parts)
