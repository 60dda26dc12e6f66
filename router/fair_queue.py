"""A queue in which tenants take turns. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Distinct items of several tenants, in order for each tenant; tenants are served round-robin."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()
        self._tenants: dict[T, str] = {}

    @property
    def tenants(self) -> Collection[str]:
        """Tenants that have items."""
        return self._queues.keys()

    def count(self, tenant: str) -> int:
        """Number of items of a tenant."""
        return len(self._queues.get(tenant, ()))

    def append(self, item: T, tenant: str) -> None:
        """Add to the end of the tenant's queue."""
        self._queues.setdefault(tenant, OrderedDict())[item] = None
        self._tenants[item] = tenant

    def prepend(self, item: T, tenant: str) -> None:
        """Add to the front of the tenant's queue; the order of the tenants stays."""
        self.append(item, tenant)
        self._queues[tenant].move_to_end(item, last=False)

    def advance(self, tenant: str) -> None:
        """Put the tenant before the others."""
        self._queues.move_to_end(tenant, last=False)

    def pop(self, item: T) -> str:
        """Remove an item, and put its tenant behind the others. Returns the tenant."""
        tenant = self._tenants[item]
        self.remove(item)
        if tenant in self._queues:
            self._queues.move_to_end(tenant)
        return tenant

    def remove(self, item: T) -> bool:
        """Remove an item; False if it was not in the queue."""
        tenant = self._tenants.pop(item, None)
        if tenant is None:
            return False
        del self._queues[tenant][item]
        if not self._queues[tenant]:
            del self._queues[tenant]
        return True

    def heads(self) -> list[T]:
        """The first item of each tenant, in the order of the tenants."""
        return [next(iter(queue)) for queue in self._queues.values()]

    def round_robin(self, load: Callable[[str], float], fits: Callable[[T], bool]) -> Iterator[T]:
        """The first item of each tenant, then the second of each, and so on; the queue must not change meanwhile.

        Tenants with a lower `load` come first; tenants of equal load stay in order. Items that don't pass `fits` are
        left out. The tenants are sorted once; an item costs the same however many there are.
        """
        queues = [iter(self._queues[tenant]) for tenant in sorted(self._queues, key=load)]
        while queues:
            longer = []
            for queue in queues:
                item = next(filter(fits, queue), None)
                if item is not None:
                    yield item
                    longer.append(queue)
            queues = longer
