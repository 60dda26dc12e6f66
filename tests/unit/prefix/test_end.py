"""The end of a prompt as a payload: what is packed comes out again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.kv.prefix.end import PromptEnd


def test_a_payload_by_hand() -> None:
    packed = PromptEnd(b"kv", b"hid").pack(8)
    assert packed == b"kvhid\0\0\0"
    found = PromptEnd.unpack(packed, 2, 3)
    assert (bytes(found.kv), bytes(found.hidden)) == (b"kv", b"hid")


@given(
    kv=st.binary(max_size=40), hidden=st.binary(min_size=1, max_size=40), spare=st.integers(0, 20), whole=st.booleans()
)
def test_what_is_packed_comes_out_again(kv: bytes, hidden: bytes, spare: int, whole: bool) -> None:
    """Also from a view that begins within another buffer, as what was received does."""
    size = len(kv) + len(hidden) + spare
    packed = PromptEnd(kv, memoryview(hidden)).pack(size)
    assert packed == kv + hidden + bytes(spare)
    found = PromptEnd.unpack(packed if whole else memoryview(b"x" + packed)[1:], len(kv), len(hidden))
    assert (bytes(found.kv), bytes(found.hidden)) == (kv, hidden)


def test_what_comes_out_is_no_copy() -> None:
    packed = PromptEnd(b"kv", b"hid").pack(8)
    found = PromptEnd.unpack(packed, 2, 3)
    assert isinstance(found.kv, memoryview)
    assert found.kv.obj is packed
    assert isinstance(found.hidden, memoryview)
    assert found.hidden.obj is packed
