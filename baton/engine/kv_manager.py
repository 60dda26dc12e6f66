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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from baton.engine.contract import EngineSpec
from baton.engine.plan import ForwardPlan, Growth, Join, Row
from baton.errors import EngineError, Overloaded
from baton.kv.pool import PageHandle, PagePool
from baton.request import SequenceState


@dataclass(eq=False, slots=True)
class RunningSequence:
    """A sequence in the batch, with its own copy of the output ids; `unread` steps that it is in are in flight.

    `planned_pages`: how many of its pages plans have sent, None before its Join. One that has `failed` got no token in
    a step: it has left, and its tokens of later steps mean nothing.
    """

    handle: PageHandle
    state: SequenceState
    output_ids: list[int]
    slot: int = -1
    planned_pages: int | None = None
    unread: int = 0
    failed: bool = False

    @property
    def position(self) -> int:
        """The position at which the next step writes KV: that of the newest token, which may be on the device only."""
        return self.state.length - 1 + self.unread


class KvManager:
    """See the module's text. `pool` holds the pages."""

    def __init__(self, spec: EngineSpec) -> None:
        self.pool = PagePool(spec.pages, spec.page_size, spec.kv_format.block_size, spec.host_pages)
        self._spec = spec
        self._free_slots = list(range(spec.slots))
        self._running: dict[PageHandle, RunningSequence] = {}
        self._left: list[int] = []
        self._reset = False

    @property
    def batch(self) -> list[RunningSequence]:
        """The sequences that have slots and are alive."""
        return [sequence for sequence in self._running.values() if sequence.handle.alive]

    @property
    def must_read_first(self) -> bool:
        """Whether the next step must not be launched before the tokens of all others are known."""
        return self._reset or any(sequence.state.params.penalizes for sequence in self._running.values())

    def insert(self, handle: PageHandle, state: SequenceState) -> None:
        """Give a sequence a slot. Raises EngineError, or Overloaded without a slot, changing nothing."""
        handle.check_alive()
        self._remove_dead()
        if handle in self._running:
            raise EngineError(f"{handle.owner}: was inserted before")
        if not 0 < state.length <= handle.capacity + 1:
            raise EngineError(f"{handle.owner}: {state.length} tokens in pages for {handle.capacity}")
        self._check_length(handle, state)
        output_ids = list(state.output_ids)
        self._take_slot(RunningSequence(handle, replace(state, output_ids=output_ids), output_ids))

    def remove(self, sequence: RunningSequence) -> None:
        """Take a sequence out of its slot, if it has one."""
        if self._running.get(sequence.handle) is not sequence:
            return
        del self._running[sequence.handle]
        heapq.heappush(self._free_slots, sequence.slot)
        if sequence.planned_pages is not None:
            self._left.append(sequence.slot)
            sequence.planned_pages = None

    @contextmanager
    def pin_batch(self) -> Iterator[list[RunningSequence]]:
        """The sequences of the next step, their pages pinned.

        Raises EngineError naming one that has no room for the step's token, or reached the model's length.
        """
        while True:
            batch = list(self._running.values())
            with self.pool.pin_batch([each.handle for each in batch], [each.position for each in batch]) as dead:
                if not dead:
                    for each in batch:
                        self._check_length(each.handle, each.state)
                    yield batch
                    return
            self._remove_dead()

    def plan(self, prompts: Sequence[Row], batch: Sequence[RunningSequence]) -> ForwardPlan:
        """Rows of prompts, and a step of all of `batch` with what has changed since the last such plan.

        The caller launches it, or calls `forget_plans`.
        """
        if not batch:
            return ForwardPlan(rows=tuple(prompts))
        joined, grew, rows = [], [], list(prompts)
        for each in batch:
            pages = each.handle.pages
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
        for each in self._running.values():
            each.planned_pages = None

    def free_all(self) -> None:
        """Free every handle, and forget all cached blocks."""
        self.pool.free_all()
        self._remove_dead()

    def _remove_dead(self) -> None:
        for sequence in [each for each in self._running.values() if not each.handle.alive]:
            self.remove(sequence)

    def _take_slot(self, sequence: RunningSequence) -> None:
        if not self._free_slots:
            raise Overloaded(f"all {self._spec.slots} slots are taken")
        sequence.slot = heapq.heappop(self._free_slots)
        self._running[sequence.handle] = sequence

    def _check_length(self, handle: PageHandle, state: SequenceState) -> None:
        if state.length >= self._spec.max_model_len:
            raise EngineError(f"{handle.owner}: has {state.length} tokens, max_model_len is {self._spec.max_model_len}")
