"""Exports and their leases in simulated time, under arbitrary interleavings of exporter, consumers and the clock.

Whatever happens: each export ends once and gives its handle back once, after the last read of it; nothing is opened
after its end; no stream hangs, and one that ends well carried exactly the KV; no lease ends early or late; and no map
of ids outgrows its bound.
"""

import asyncio
import itertools
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.contract import KvHandle
from baton.errors import (
    BatonError,
    IncompleteTransfer,
    InvalidRequest,
    NotFound,
    StaleIncarnation,
    TransferError,
    Unavailable,
)
from baton.transfer import export, wire
from baton.transfer.export import Export, ExportRegistry
from baton.transfer.fetcher import Receiver
from tests.effort import machine_test
from tests.property.virtual import VirtualLoop
from tests.unit.transfer.support import INCARNATION, LAYERS, WHOLE, Engine, contents, handoff, prefilled, whole

TOKENS = 8
LEASE_S, UNKNOWN_WAIT_S = 10.0, 2.0
MAX_REMEMBERED = 5
EXACT = 1e-6
IDS = st.integers(0, 3)
PAUSES = st.sampled_from([0.0, 0.0, 1.0, 4.0, 11.0])


@dataclass(eq=False)
class Exported:
    export: Export
    handle: KvHandle
    closed: int = 0
    committed: bool = False
    renewed_at: float = 0.0


@dataclass(eq=False)
class Fetch:
    """One consumer: it takes a frame every `pause_s`, writes it, and may stop before the end."""

    task: asyncio.Task[str]
    transfer_id: str
    since: float
    pause_s: float


class ExportsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.engine, self.consumer = Engine(page_size=4), Engine(page_size=16)
        self.names = itertools.count()
        self.now_used: list[str] = [f"t{next(self.names)}" for _ in range(4)]
        self.announced: set[str] = set()
        self.open: dict[str, Exported] = {}
        self.all: list[Exported] = []
        self.ended: list[str] = []
        self.fetches: list[Fetch] = []
        self._remembered, export.MAX_REMEMBERED = export.MAX_REMEMBERED, MAX_REMEMBERED
        self.exports = self.loop.call(self._made)
        handle = prefilled(self.engine, TOKENS)
        self.truth = contents(self.engine, handle, whole(TOKENS))
        self.engine.free(handle)

    def _made(self) -> ExportRegistry:
        token_bytes = self.engine.spec.kv_format.token_bytes // LAYERS
        return ExportRegistry(
            self.engine, INCARNATION, lease_s=LEASE_S, unknown_wait_s=UNKNOWN_WAIT_S, frame_bytes=3 * token_bytes
        )

    def id(self, index: int) -> str:
        return self.now_used[index]

    def picked(self, index: int) -> Exported | None:
        return self.open.get(self.id(index))

    def refuses(self, *kinds: type[BatonError], call: Any, args: tuple[Any, ...]) -> None:
        try:
            self.loop.call(call, *args)
        except kinds:
            return
        raise AssertionError(f"{call} took {args}")

    @rule(index=IDS)
    def announce(self, index: int) -> None:
        transfer_id = self.id(index)
        if transfer_id in self.open or transfer_id in self.announced:
            self.refuses(InvalidRequest, call=self.exports.announce, args=(transfer_id,))
        elif transfer_id in self.ended:
            self.refuses(TransferError, call=self.exports.announce, args=(transfer_id,))
        else:
            self.loop.call(self.exports.announce, transfer_id)
            self.announced.add(transfer_id)

    @rule(index=IDS)
    def withdraw(self, index: int) -> None:
        transfer_id = self.id(index)
        self.loop.call(self.exports.withdraw, transfer_id, "was given up")
        if transfer_id in self.announced:
            self._has_ended(transfer_id)

    @rule(index=IDS)
    def open_export(self, index: int) -> None:
        transfer_id = self.id(index)
        handle = prefilled(self.engine, TOKENS)
        ours = Exported(None, handle)  # type: ignore[arg-type]

        def on_closed() -> None:
            ours.closed += 1
            self.engine.free(handle)

        def opened() -> None:
            ours.export = self.exports.open(transfer_id, handle, TOKENS, on_closed=on_closed)
            self.all.append(ours)

        if transfer_id in self.open or transfer_id in self.ended:
            kind = InvalidRequest if transfer_id in self.open else TransferError
            self.refuses(kind, call=opened, args=())
            self.engine.free(handle)
            return
        self.loop.call(opened)
        self.announced.discard(transfer_id)
        self.open[transfer_id] = ours

    @rule(index=IDS, layers=st.sampled_from([range(1), range(LAYERS)]), end=st.integers(0, TOKENS))
    def advance(self, index: int, layers: range, end: int) -> None:
        if ours := self.picked(index):
            for layer in layers:
                self.loop.call(ours.export.mark_final, layer, end)

    @rule(index=IDS, finish=st.booleans())
    def commit(self, index: int, finish: bool) -> None:
        ours = self.picked(index)
        if ours is None:
            return
        if finish:
            self.advance(index, range(LAYERS), TOKENS)
        if ours.committed:
            self.refuses(InvalidRequest, call=ours.export.commit, args=(handoff(TOKENS),))
        elif min(ours.export._final) < TOKENS:
            self.refuses(IncompleteTransfer, call=ours.export.commit, args=(handoff(TOKENS),))
        else:
            self.loop.call(ours.export.commit, handoff(TOKENS))
            ours.committed, ours.renewed_at = True, self.loop.now

    @rule(index=IDS, pause_s=PAUSES, early=st.booleans(), seconds=st.sampled_from([0.0, 9.5, 30.0]))
    def serve(self, index: int, pause_s: float, early: bool, seconds: float) -> None:
        """A whole life in one rule, which single rules would seldom find."""
        if self.id(index) in self.open or self.id(index) in self.ended:
            return
        self.open_export(index)
        if early:
            self.fetch(index, pause_s, 0, False)
        self.commit(index, True)
        if not early:
            self.fetch(index, pause_s, 0, False)
        self.pass_time(seconds, 0.0)

    @rule(index=IDS)
    def fail(self, index: int) -> None:
        if ours := self.picked(index):
            self.loop.call(ours.export.fail, ValueError("out of memory"))
            assert ours.export.ended
            self._has_ended(self.id(index))

    @precondition(lambda self: self.all)
    @rule(index=st.integers(0, 99))
    def go_on_after_the_end(self, index: int) -> None:
        ours = self.all[index % len(self.all)]
        if ours.export.ended:
            self.loop.call(ours.export.mark_final, 0, TOKENS)
            self.loop.call(ours.export.commit, handoff(TOKENS))
            self.loop.call(ours.export.fail, ValueError("out of memory"))

    @rule(index=IDS, stale=st.booleans())
    def release(self, index: int, stale: bool) -> None:
        transfer_id = self.id(index)
        self.loop.call(self.exports.release, transfer_id, "another" if stale else INCARNATION)
        if not stale and transfer_id not in self.ended:
            self._has_ended(transfer_id)

    @rule(
        index=IDS, pause_s=st.sampled_from([0.0, 0.0, 1.0, 4.0, 11.0]), frames=st.integers(0, 12), stale=st.booleans()
    )
    def fetch(self, index: int, pause_s: float, frames: int, stale: bool) -> None:
        transfer_id = self.id(index)
        incarnation = "another" if stale and frames == 12 else INCARNATION
        task = self.loop.spawn(self._fetched(transfer_id, incarnation, pause_s, frames if stale else 99))
        self.fetches.append(Fetch(task, transfer_id, self.loop.now, pause_s))

    async def _fetched(self, transfer_id: str, incarnation: str, pause_s: float, frames_wanted: int) -> str:
        try:
            export = await self.exports.find(transfer_id, incarnation)
        except StaleIncarnation:
            assert incarnation != INCARNATION
            return "stale"
        except NotFound:
            assert transfer_id not in self.exports._open
            return "not found"
        except Unavailable:
            return "closing"
        (ours,) = (each for each in self.all if each.export is export)
        handle = self.consumer.reserve(transfer_id, TOKENS)
        receiver = Receiver(self.consumer, handle, whole(TOKENS), TOKENS, [WHOLE], wire.seed_of(transfer_id))
        try:
            async with aclosing(export.frames(whole(TOKENS))) as frames:
                ours.renewed_at = self.loop.now
                async for frame in frames:
                    receiver.add_frame(frame)
                    if frames_wanted <= 0:
                        return "stopped"
                    frames_wanted -= 1
                    await asyncio.sleep(pause_s)
                    if not export.ended:
                        ours.renewed_at = self.loop.now
            assert receiver.gaps() == []
            assert receiver.handoff == handoff(TOKENS)
            assert contents(self.consumer, handle, whole(TOKENS)) == self.truth
            return "complete"
        except TransferError:
            assert export.ended
            return "ended"
        finally:
            self.consumer.free(handle)

    @precondition(lambda self: self.fetches)
    @rule(index=st.integers(0, 99))
    def cancel_fetch(self, index: int) -> None:
        self.fetches[index % len(self.fetches)].task.cancel()
        self.loop.settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 9.0, 11.0, 30.0]), work_s=st.sampled_from([0.0, 0.5, 3.0]))
    def pass_time(self, seconds: float, work_s: float) -> None:
        self.loop.work_s = lambda: work_s
        long = seconds > 3.0
        while seconds > 0:
            self.loop.advance(min(seconds, 2.0))
            self._leases_end_on_time()
            seconds -= 2.0
        committed = {name for name, ours in self.open.items() if ours.committed}
        for fetch in self.fetches:
            if not work_s and long and not fetch.pause_s and fetch.transfer_id in committed:
                assert fetch.task.done(), "a stream of a finished export does not move"

    @rule(index=IDS)
    def another_request(self, index: int) -> None:
        if self.id(index) not in self.open and self.id(index) not in self.announced:
            self.now_used[index] = f"t{next(self.names)}"

    def _has_ended(self, transfer_id: str) -> None:
        self.announced.discard(transfer_id)
        self.open.pop(transfer_id, None)
        self.ended = [*(each for each in self.ended if each != transfer_id), transfer_id][-MAX_REMEMBERED:]

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        self._leases_end_on_time()
        self._each_ends_once_and_then_gives_back()
        self._nothing_is_listed_that_is_over()

    def _leases_end_on_time(self) -> None:
        now = self.loop.now
        lost = [(ours.renewed_at + LEASE_S, name) for name, ours in self.open.items() if ours.export.ended]
        for due, name in sorted(lost):
            assert self.open[name].committed
            assert due <= now + EXACT, f"{name} lost its lease {due - now} s early"
            self._has_ended(name)
        for name, ours in self.open.items():
            assert not ours.committed or now < ours.renewed_at + LEASE_S + EXACT, f"{name} outlived its lease"

    def _each_ends_once_and_then_gives_back(self) -> None:
        for ours in self.all:
            assert ours.closed == (ours.export.ended and not ours.export._reading)
            assert ours.handle.alive == (not ours.closed)
        assert self.engine.copies == 0
        self.engine.audit()
        self.consumer.audit()

    def _nothing_is_listed_that_is_over(self) -> None:
        assert set(self.exports._open) == set(self.open)
        assert self.exports._announced == self.announced
        assert len(self.exports._ended) <= MAX_REMEMBERED
        waiting = {fetch.transfer_id for fetch in self.fetches if not fetch.task.done()}
        assert set(self.exports._waiters) <= waiting

    @invariant()
    def no_fetch_waits_for_what_nobody_announced(self) -> None:
        known = {ours.export.transfer_id for ours in self.all} | self.announced
        for fetch in self.fetches:
            if not fetch.task.done() and fetch.transfer_id not in known:
                assert self.loop.now <= fetch.since + UNKNOWN_WAIT_S + EXACT

    def teardown(self) -> None:
        try:
            self.loop.work_s = lambda: 0.2
            self.loop.call(self.exports.close)
            self.loop.finish()
            self.loop.run_until_complete(self.exports.wait_closed())
            for fetch in self.fetches:
                if not fetch.task.cancelled():
                    assert fetch.task.result() in {"complete", "ended", "not found", "closing", "stale", "stopped"}
            assert all(ours.closed == 1 for ours in self.all)
            assert self.engine.audit() == self.consumer.audit() == {}
            assert not self.exports._waiters
            assert not self.exports._open
        finally:
            export.MAX_REMEMBERED = self._remembered
            self.loop.close()


TestExports = machine_test(ExportsMachine, 60, 40)
