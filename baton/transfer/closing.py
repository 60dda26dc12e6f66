"""The frames that close a stream of KV: the manifest, then the commit with the handoff.

Both must be encoded exactly as their contents are serialized here. So a flipped bit in them is noticed, unless the
comparison with what arrived notices it anyway: the manifest is compared with the frames before it, the commit with the
length and the shards that were asked for, and with the SHA-256 of its handoff.

A handoff of a million tokens has 4 MB. Where it stands in a commit is written and found by hand, so that no generated
class copies it again and again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from baton.errors import BatonError, CorruptFrame, TransferError
from baton.kv.format import Shard
from baton.pb import kv_pb2
from baton.request import Handoff
from baton.rpc.convert import handoff_from_wire, handoff_to_wire, shard_from_proto, shard_to_proto
from baton.rpc.packed import begin_field, read_varint, split

HANDOFF_VERSION = 3

_COMMIT, _HANDOFF = 4, 3
"""Numbers of the fields `KvFrame.commit` and `KvCommit.handoff`."""

_COMMIT_TAG = begin_field(_COMMIT, 0)[:1]

TokenRun = tuple[int, int, int]
"""(layer, first token, end of tokens): consecutive tokens of one layer."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The frames that a stream has carried, of the layers and heads of `shard`.

    `digest` is the CRC-32C over the checksums of the frames, in the order in which they were sent.
    """

    frames: int
    runs: tuple[TokenRun, ...]
    digest: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a stream; `handoff` is a serialized Handoff whose SHA-256 is checked, None for the export of a
    prefix.

    `shards` are all shards of the exporter. `prefix_digest` is the digest of a prefix's last full block.
    """

    length: int
    version: int
    handoff: bytes | memoryview | None
    shards: tuple[Shard, ...]
    prefix_digest: bytes = b""


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as a frame."""
    ranges = [kv_pb2.KvRange(layer=layer, token_start=start, token_end=end) for layer, start, end in manifest.runs]
    return _bytes(
        kv_pb2.KvFrame(
            manifest=kv_pb2.KvManifest(
                frames=manifest.frames, ranges=ranges, digest=manifest.digest, shard=shard_to_proto(manifest.shard)
            )
        )
    )


def encode_commit(
    length: int,
    handoff: bytes | memoryview | None,
    shards: Sequence[Shard],
    version: int = HANDOFF_VERSION,
    prefix_digest: bytes = b"",
) -> bytes:
    """A commit frame for an export of `length` tokens; `handoff` is a serialized Handoff, None for the export of a
    prefix.
    """
    commit = Commit(length, version, handoff, tuple(shards), prefix_digest)
    before, after = _around_handoff(commit)
    return b"".join((before, handoff or b"", after))


def _around_handoff(commit: Commit) -> tuple[bytes, bytes]:
    """The commit's frame before its handoff, and after it."""
    handoff = commit.handoff
    first = kv_pb2.KvCommit(length=commit.length, version=0 if handoff is None else commit.version)
    last = kv_pb2.KvCommit(
        digest=hashlib.sha256(handoff or b"").digest(),
        prefix_digest=commit.prefix_digest,
        shards=map(shard_to_proto, commit.shards),
    )
    size = len(handoff or b"")
    before, after = _bytes(first) + (begin_field(_HANDOFF, size) if size else b""), _bytes(last)
    return begin_field(_COMMIT, len(before) + size + len(after)) + before, after


def decode(frame: bytes) -> Manifest | Commit:
    """Decode and check a manifest or a commit; raises CorruptFrame."""
    try:
        if frame.startswith(_COMMIT_TAG):
            return _commit(frame)
        message = kv_pb2.KvFrame.FromString(frame)
    except DecodeError:
        raise CorruptFrame(f"a frame of {len(frame)} bytes can't be read") from None
    if message.HasField("manifest"):
        manifest = _manifest(message.manifest)
        if encode_manifest(manifest) != frame:
            raise CorruptFrame("a manifest's encoding does not match its contents")
        return manifest
    raise CorruptFrame(f"a frame of {len(frame)} bytes is neither data nor manifest nor commit")


def pack(handoff: Handoff) -> bytes:
    """Serialize a handoff; takes milliseconds for prompts of hundreds of thousands of tokens."""
    return b"".join(handoff_to_wire(handoff))


def unpack(data: bytes | memoryview, vocab_size: int) -> Handoff:
    """Deserialize a handoff; raises TransferError if the bytes are not a valid one, or have other token ids."""
    try:
        return handoff_from_wire(data, vocab_size)
    except (DecodeError, BatonError) as error:
        raise TransferError(f"the handoff can't be read: {error}") from error


def _manifest(message: kv_pb2.KvManifest) -> Manifest:
    runs = tuple((run.layer, run.token_start, run.token_end) for run in message.ranges)
    return Manifest(message.frames, runs, message.digest, shard_from_proto(message.shard))


def _commit(frame: bytes) -> Commit:
    """The commit in a frame, its handoff a view into it; raises CorruptFrame or DecodeError."""
    body = memoryview(frame)[read_varint(memoryview(frame), len(_COMMIT_TAG))[1] :]
    rest, found = split(body, _HANDOFF)
    message, handoff = kv_pb2.KvCommit.FromString(rest), found.get(_HANDOFF)
    shards = tuple(map(shard_from_proto, message.shards))
    commit = Commit(message.length, message.version, handoff, shards, message.prefix_digest)
    before, after = _around_handoff(commit)
    whole = len(before) + len(handoff or b"") + len(after)
    if not (frame.startswith(before) and frame.endswith(after) and len(frame) == whole):
        raise CorruptFrame("a commit's digest is not that of its handoff")
    return commit


def _bytes(message: Message) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))
