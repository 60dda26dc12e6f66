"""Deletes all blocks of a KV format at one node of Redis, in batches, each with a time budget of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from baton.kv.prefix.redis.calls import RedisCalls
from baton.kv.prefix.redis.faults import count_fault, fault_label
from baton.kv.prefix.redis.nodes import Node

CLEAR_KEYS = 250


@dataclass(slots=True, eq=False)
class ClearJob:
    """The deletion of all our keys at one node: its progress, and the first error."""

    node: Node
    deleted: int = 0
    done: bool = False
    refused: Exception | None = None

    async def run(self, calls: RedisCalls, pattern: bytes, budget_s: float) -> None:
        """Delete the keys that match `pattern`, until all keys were scanned or a batch fails."""
        cursor, scan = 0, ("MATCH", pattern, "COUNT", CLEAR_KEYS)
        # In the lane of writes, so that it does not delay look-ups.
        ask = partial(calls.call_node, self.node, "write", budget_s=budget_s)
        while not self.done and not self.refused:
            replies = await ask([("SCAN", cursor, *scan)])
            if replies is None:
                return
            if isinstance(replies[0], Exception):
                self.refused = replies[0]
                count_fault(fault_label(replies[0]))
                return
            cursor, keys = replies[0]
            deleted = await ask([("UNLINK", key) for key in keys]) if keys else []
            if deleted is None:
                return
            self.deleted += sum(reply for reply in deleted if isinstance(reply, int))
            for error in (reply for reply in deleted if isinstance(reply, Exception)):
                count_fault(fault_label(error))
                self.refused = self.refused or error
            self.done = cursor == 0
