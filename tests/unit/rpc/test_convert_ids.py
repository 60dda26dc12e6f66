"""Token ids as bytes, and messages without some of their fields."""

import pytest

from baton.errors import CorruptFrame
from baton.pb import kv_pb2
from baton.rpc.convert import pack_ids, split, unpack_ids

MESSAGE = kv_pb2.Handoff(request_id="r", attempt=7, prompt_token_ids=[1, 2**32 - 1], output_token_ids=[3])


def test_a_field_is_what_the_generated_class_writes() -> None:
    ids = list(range(40_000))
    written = b"".join(pack_ids(3, ids))
    assert written == kv_pb2.Handoff(prompt_token_ids=ids).SerializeToString()
    _, found = split(memoryview(written), 3)
    assert [each for piece in unpack_ids(found[3]) for each in piece] == ids
    assert not list(pack_ids(3, []))


def test_the_rest_of_a_message_is_a_message() -> None:
    rest, found = split(memoryview(MESSAGE.SerializeToString()), 3, 4)
    assert kv_pb2.Handoff.FromString(rest) == kv_pb2.Handoff(request_id="r", attempt=7)
    assert {number: b"".join(map(bytes, unpack_ids(data))) for number, data in found.items()} == {
        3: bytes([1, 0, 0, 0, 255, 255, 255, 255]),
        4: bytes([3, 0, 0, 0]),
    }


@pytest.mark.parametrize(
    "data",
    [
        b"\x1a\x08\x01\x00\x00\x00",  # Fewer bytes than it says.
        b"\x1a\x00\x1a\x00",  # Twice.
        b"\x1d\x01\x00\x00\x00",  # Not packed.
        b"\x0b",  # A group.
        b"\x10\xff",  # A number without end.
        b"\x10\x01" * 1025,  # More fields than any message has.
    ],
)
def test_data_that_is_no_such_message_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptFrame):
        split(memoryview(data), 3)


def test_bytes_of_no_whole_number_of_ids_are_refused() -> None:
    with pytest.raises(CorruptFrame, match="5 bytes"):
        list(unpack_ids(memoryview(b"12345")))
