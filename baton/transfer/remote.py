"""KV at another worker, as a message names it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kv.format import Shard

MAX_TICKET_BYTES = 4096
"""Largest size of a signed ticket; a real one has about 200 bytes."""

MAX_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class RemoteExport:
    """An export of another worker. Each of its `shards` serves a part of it, under the same transfer id.

    `ticket` is the router's permission to fetch it; empty if the fleet has no ticket keys.
    """

    transfer_id: str
    incarnation: str
    shards: tuple[Shard, ...]
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A decode worker's export of the first `tokens` tokens of a prompt."""

    export: RemoteExport
    tokens: int
