"""Handoffs as bytes: what a commit's digest is computed over."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from baton.errors import BatonError, TransferError
from baton.pb import kv_pb2
from baton.request import Handoff
from baton.rpc.convert import handoff_from_proto, handoff_to_proto


def pack(handoff: Handoff) -> bytes:
    """Serialize; takes milliseconds for prompts of hundreds of thousands of tokens."""
    return bytes(handoff_to_proto(handoff).SerializeToString(deterministic=True))


def unpack(data: bytes) -> Handoff:
    """Undo `pack`; raises TransferError if the bytes are no handoff, or break a rule of its types."""
    try:
        return handoff_from_proto(kv_pb2.Handoff.FromString(data))
    except (DecodeError, BatonError) as error:
        raise TransferError(f"the handoff can't be read: {error}") from error
