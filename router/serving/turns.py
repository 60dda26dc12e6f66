"""Whose work is next on a few threads: tenants take turns, and none may have all threads. Pure.

A tenant may use all threads but one at a time. So another tenant's first piece of work starts at once beside one
flood, and beside several after at most one piece of each.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Work that waits for one of `threads` threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._most = max(1, threads - 1)
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def waiting(self, tenant: str) -> int:
        """How many pieces of work of a tenant have not begun."""
        return len(self._waiting.get(tenant, ()))

    def push(self, tenant: str, work: T) -> None:
        """Add work at the end of the tenant's queue."""
        self._waiting.setdefault(tenant, deque()).append(work)

    def begin(self) -> tuple[str, T] | None:
        """Take the work that is to begin now, with its tenant; `end` tells when it has ended. None if it must wait."""
        if self._running.total() >= self._threads:
            return None
        for tenant, queue in self._waiting.items():
            if self._running[tenant] < self._most:
                work = queue.popleft()
                self._waiting.move_to_end(tenant)
                self._drop_if_empty(tenant)
                self._running[tenant] += 1
                return tenant, work
        return None

    def end(self, tenant: str) -> None:
        """A piece of work of the tenant has ended."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def remove(self, tenant: str, work: T) -> bool:
        """Drop work that has not begun; False if it is not there."""
        queue = self._waiting.get(tenant)
        if queue is None or work not in queue:
            return False
        queue.remove(work)
        self._drop_if_empty(tenant)
        return True

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
