"""Pages and slots of one engine: pure bookkeeping, without tensors.

    reserve ─▶ handle ─▶ insert ─▶ in a slot ─▶ remove

Pages, handles and cached blocks are the pool's (`baton.kv.pool`). This adds the sequences of the generation batch: each
has a slot while it runs, and the ModelRunner keeps what it needs of it by that slot. So the KvManager also keeps what
the ModelRunner was told, and says with each step what has changed since (`baton.engine.plan`).

A freed handle may still have a slot, but no page. Sequences of dead handles leave when the next step or insert begins.
The pool has a lock of its own; all else belongs to the engine thread.
"""

from __future__ import annotations

import heapq
from collections import abc
from contextlib import contextmanager
from dataclasses import replace

from baton.engine.contract import EngineSpec
from baton.engine.plan import ForwardPlan, Growth, Join, Row
from baton.engine.sequence import Sequence
from baton.errors import EngineError, Overloaded
from baton.kv.pool import PageHandle, PagePool


class KvManager:
    """Manager of sequences and their KV; `pool` holds the pages."""

    def __init__(self, spec: EngineSpec) -> None:
        self.pool = PagePool(spec.pages, spec.page_size, spec.kv_format.block_size, spec.host_pages)
        self._spec = spec
        self._free_slots = list(range(spec.slots))
        self._running: dict[Sequence, PageHandle] = {}
        self._left: list[int] = []
        self._reset = False

    @property
    def batch(self) -> list[Sequence]:
        """The sequences that have slots and are alive."""
        return [sequence for sequence in self._running if sequence.handle.alive]

    @property
    def must_read_first(self) -> bool:
        """Whether the next step must not be launched before the tokens of all others are known."""
        return self._reset or any(sequence.state.params.penalizes for sequence in self._running)

    def insert(self, sequence: Sequence, handle: PageHandle) -> None:
        """Give a sequence, which has this handle, a slot. Raises EngineError, or Overloaded without one, changing
        nothing.
        """
        handle.check_alive()
        self._remove_dead()
        if handle in self._running.values():
            raise EngineError(f"{handle.owner}: was inserted before")
        if not 0 < sequence.length <= handle.capacity + 1:
            raise EngineError(f"{handle.owner}: {sequence.length} tokens in pages for {handle.capacity}")
        self._check_length(sequence)
        if not self._free_slots:
            raise Overloaded(f"all {self._spec.slots} slots are taken")
        sequence.slot = heapq.heappop(self._free_slots)
        self._running[sequence] = handle

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot, if it has one."""
        if self._running.pop(sequence, None) is None:
            return
        heapq.heappush(self._free_slots, sequence.slot)
        if sequence.planned_pages is not None:
            self._left.append(sequence.slot)
            sequence.planned_pages = None

    @contextmanager
    def pin_batch(self) -> abc.Iterator[list[Sequence]]:
        """The sequences of the next step, their pages pinned.

        Raises EngineError naming one that has no room for the step's token, or reached the model's length.
        """
        while True:
            batch = list(self._running)
            with self.pool.pin_batch(list(self._running.values()), [each.position for each in batch]) as dead:
                if not dead:
                    for each in batch:
                        self._check_length(each)
                    yield batch
                    return
            self._remove_dead()

    def plan(self, prompts: abc.Sequence[Row], batch: abc.Sequence[Sequence]) -> ForwardPlan:
        """Rows of prompts, and a step of all of `batch` with what has changed since the last such plan.

        The caller launches it, or calls `forget_plans`.
        """
        if not batch:
            return ForwardPlan(rows=tuple(prompts))
        joined, grew, rows = [], [], list(prompts)
        for each in batch:
            pages = self._running[each].pages
            count = len(pages)
            if each.planned_pages is None:
                state = replace(each.state, output_ids=tuple(each.output_ids))
                joined.append(Join(each.slot, pages[:count], state))
            elif count > each.planned_pages:
                grew.append(Growth(each.slot, pages[each.planned_pages : count]))
            each.planned_pages = count
            rows.append(Row(each.slot, each.position))
        plan = ForwardPlan(self._reset, tuple(self._left), tuple(joined), tuple(grew), tuple(rows))
        self._reset, self._left = False, []
        return plan

    def forget_plans(self) -> None:
        """A plan failed: the next one resets the ModelRunner, and fills all slots again."""
        self._reset, self._left = True, []
        for each in self._running:
            each.planned_pages = None

    def free_all(self) -> None:
        """Free every handle, and forget all cached blocks."""
        self.pool.free_all()
        self._remove_dead()

    def _remove_dead(self) -> None:
        for sequence in [each for each, handle in self._running.items() if not handle.alive]:
            self.remove(sequence)

    def _check_length(self, sequence: Sequence) -> None:
        if sequence.length >= (most := self._spec.max_model_len):
            raise EngineError(f"{sequence.handle.owner}: has {sequence.length} tokens, max_model_len is {most}")
