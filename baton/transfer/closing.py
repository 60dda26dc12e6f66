"""The frames that close a stream of KV: the manifest, then the commit with the handoff.

Both must be encoded exactly as their contents are serialized here. So a flipped bit in them is noticed, unless the
comparison with what arrived notices it anyway: the manifest is compared with the frames before it, the commit with the
length and the shards that were asked for, and with the SHA-256 of its handoff.
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
from baton.rpc.convert import handoff_from_proto, handoff_to_proto, shard_from_proto, shard_to_proto

HANDOFF_VERSION = 3

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
    handoff: bytes | None
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
    handoff: bytes | None,
    shards: Sequence[Shard],
    version: int = HANDOFF_VERSION,
    prefix_digest: bytes = b"",
) -> bytes:
    """A commit frame for an export of `length` tokens; `handoff` is a serialized Handoff, None for the export of a
    prefix.
    """
    return _bytes(
        kv_pb2.KvFrame(
            commit=kv_pb2.KvCommit(
                length=length,
                version=0 if handoff is None else version,
                handoff=handoff,
                digest=hashlib.sha256(handoff or b"").digest(),
                prefix_digest=prefix_digest,
                shards=map(shard_to_proto, shards),
            )
        )
    )


def decode(frame: bytes) -> Manifest | Commit:
    """Decode and check a manifest or a commit; raises CorruptFrame."""
    try:
        message = kv_pb2.KvFrame.FromString(frame)
    except DecodeError:
        raise CorruptFrame(f"a frame of {len(frame)} bytes can't be read") from None
    if message.HasField("manifest"):
        manifest = _manifest(message.manifest)
        if encode_manifest(manifest) != frame:
            raise CorruptFrame("a manifest is not encoded as its contents demand")
        return manifest
    if message.HasField("commit"):
        commit = _commit(message.commit)
        if encode_commit(commit.length, commit.handoff, commit.shards, commit.version, commit.prefix_digest) != frame:
            raise CorruptFrame("a commit's digest is not that of its handoff")
        return commit
    raise CorruptFrame(f"a frame of {len(frame)} bytes is neither data nor manifest nor commit")


def pack(handoff: Handoff) -> bytes:
    """Serialize a handoff; takes milliseconds for prompts of hundreds of thousands of tokens."""
    return _bytes(handoff_to_proto(handoff))


def unpack(data: bytes, vocab_size: int) -> Handoff:
    """Deserialize a handoff; raises TransferError if the bytes are not a valid one, or have other token ids."""
    try:
        return handoff_from_proto(kv_pb2.Handoff.FromString(data), vocab_size)
    except (DecodeError, BatonError) as error:
        raise TransferError(f"the handoff can't be read: {error}") from error


def _manifest(message: kv_pb2.KvManifest) -> Manifest:
    runs = tuple((run.layer, run.token_start, run.token_end) for run in message.ranges)
    return Manifest(message.frames, runs, message.digest, shard_from_proto(message.shard))


def _commit(message: kv_pb2.KvCommit) -> Commit:
    shards = tuple(map(shard_from_proto, message.shards))
    return Commit(message.length, message.version, message.handoff or None, shards, message.prefix_digest)


def _bytes(message: Message) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))
