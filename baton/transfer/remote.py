"""KV at another worker, as those name it who are told where to fetch it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kv.format import Shard

MAX_TICKET_BYTES = 4096
"""Most bytes of a signed ticket; one has about 200."""

MAX_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class RemoteExport:
    """An export of another worker: each of its `shards` serves its part, under the same transfer id.

    `ticket` is the router's permission to fetch it, empty where the fleet has no ticket keys.
    """

    transfer_id: str
    incarnation: str
    shards: tuple[Shard, ...]
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A decode worker's export of a prompt's first `tokens` tokens."""

    export: RemoteExport
    tokens: int
