"""Expected state of a decode worker's attempts, and stand-ins for the worker's surroundings."""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.engine.contract import Engine, KvHandle
from baton.engine.fake import FakeEngine
from baton.errors import NotFound, TransferError
from baton.request import CachePolicy, FinishReason
from baton.transfer import wire
from baton.transfer.export import ExportRegistry
from baton.transfer.wire import Commit, KvSlice, Manifest
from decode_svc.messages import AttemptKey, FailureKind, SessionDown
from decode_svc.session import RouterSession
from tests.decoding import Prefilled, alone, digests, prefill
from tests.engine_calls import prefill_chunk
from tests.prefix_cache import MemoryPrefixCache
from tests.property.virtual import VirtualLoop

_alone = functools.cache(alone)


@dataclass(eq=False)
class Try:
    """An attempt as its router sees it; `named` are the ids whose blocks it has said to be the context's."""

    session: RouterSession
    key: AttemptKey
    ready: Prefilled
    fetched: Any
    deadline: float
    reserved_at: float
    named: Sequence[int] = ()
    salt: bytes = b""
    cache: CachePolicy = CachePolicy.READ_WRITE
    cached: int = 0
    granted: bool = False
    refused: bool = False
    waiting: bool = False
    started_at: float | None = None
    told_to_end: bool = False
    failed: FailureKind | None = None
    cancelled: set[int] = field(default_factory=set)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether nothing may be told of it any more."""
        over = set(self.tokens) <= set(self.finished) | self.cancelled
        # A prefill that has finished is known here at once, and to decode when it has taken it over.
        done = self.fetched.done() and not self.fetched.cancelled() and self.fetched.exception() is None
        known = (done and not self.lies) or set(self.tokens) <= self.cancelled
        return bool(self.failed) or self.told_to_end or (over and known)

    @property
    def lies(self) -> bool:
        """Whether pages were pinned that hold something else."""
        return tuple(self.named[: self.cached]) != self.ready.handoff.prompt_ids[: self.cached]

    def chains(self) -> list[list[int]]:
        """The ids of each choice, up to its end."""
        handoff = self.ready.handoff
        return [[*handoff.prompt_ids, *_alone(handoff.prompt_ids, handoff.params, choice)] for choice in self.tokens]


def goes_on(ours: Try) -> bool:
    """Whether it holds something at the worker."""
    return ours.granted and not ours.ended


def waits(ours: Try) -> bool:
    """Whether its reservation waits at the worker."""
    return ours.waiting and not ours.ended


class Book:
    """Attempts by request id; holds what routers are told against what may be told them."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.tries_of: dict[str, Try] = {}

    async def listen(self, session: RouterSession) -> None:
        async for down in session.messages():
            self._told(session, down)

    def _told(self, session: RouterSession, down: SessionDown) -> None:
        for key, result in down.reserved:
            ours = self._of(session, key)
            assert not ours.granted
            assert not ours.refused
            assert not ours.told_to_end
            if result.waiting:
                assert not result.granted
                assert not ours.waiting
                ours.waiting = True
                continue
            ours.granted, ours.refused, ours.waiting = result.granted, not result.granted, False
            assert ours.granted or self.loop.now >= ours.deadline
            ours.cached, ours.reserved_at = result.cached_tokens, self.loop.now
            assert ours.cached <= len(ours.named)
        for key, failure in down.failures:
            ours = self._of(session, key)
            assert ours.granted
            assert not ours.ended, f"{failure} of what had ended"
            assert failure.kind is not FailureKind.DEADLINE or self.loop.now >= ours.deadline
            ours.failed = failure.kind
        for key, output in down.outputs:
            ours, choice = self._of(session, key), output.choice_index
            assert not ours.ended
            assert choice not in ours.cancelled
            assert choice not in ours.finished
            assert output.output_index == len(ours.tokens[choice])
            ours.tokens[choice] += [token.token_id for token in output.tokens]
            if output.finish is not None:
                ours.finished[choice] = output.finish
        if down.live is not None:
            here = [each for each in self.tries_of.values() if each.session is session]
            assert set(down.live) == {each.key for each in here if goes_on(each) or waits(each)}

    def _of(self, session: RouterSession, key: AttemptKey) -> Try:
        ours = self.tries_of[key.request_id]
        assert ours.session is session
        return ours


def check_tokens(tries: Iterable[Try]) -> None:
    """Each choice told the beginning of what it gives alone, and all of it if it has finished."""
    for ours in tries:
        handoff = ours.ready.handoff
        for choice, tokens in ours.tokens.items():
            expected = _alone(handoff.prompt_ids, handoff.params, choice)
            assert tokens == expected[: len(tokens)]
            assert choice not in ours.finished or tokens == expected


def check_left(engine: Engine, cache: MemoryPrefixCache, tries: Iterable[Try]) -> None:
    """The content of pool and write-backs is right, and none of it is of attempts that may not write."""
    chains = [(ids, ours.salt) for ours in tries for ids in ours.chains()]
    check_pool(engine, chains)
    truth = {
        name: payload
        for ids, salt in chains
        if not salt
        for name, payload in zip(digests(engine, ids, salt), payloads(engine, ids), strict=True)
    }
    assert {name: bytes(payload) for name, payload in cache.blocks.items()}.items() <= truth.items()
    assert not any(engine.match_prefix(digests(engine, ids, salt)) for ids, salt in chains if salt)


def payloads(engine: Engine, ids: Sequence[int]) -> list[bytes]:
    """The KV of the full blocks of `ids`, as an engine of this kind computes it."""
    spec = engine.spec
    fresh = FakeEngine(page_size=spec.page_size, pages=64, block_size=spec.kv_format.block_size)
    handle = fresh.reserve("r", len(ids))
    prefill_chunk(fresh, handle, ids, 0, len(ids), on_layer=lambda layer: None)
    return held_payloads(fresh, handle, len(ids) // spec.kv_format.block_size)


def held_payloads(engine: Engine, handle: KvHandle, blocks: int) -> list[bytes]:
    """The first blocks in the handle's pages."""
    return engine.read_blocks(handle, 0, blocks) if blocks else []


def check_pool(engine: Engine, chains: Sequence[tuple[Sequence[int], bytes]]) -> None:
    """Cached blocks of these (ids, salt) have the KV of these ids."""
    for ids, salt in chains:
        names = digests(engine, ids, salt)
        handle = engine.reserve("check", engine.match_prefix(names), names)
        found = held_payloads(engine, handle, handle.cached_tokens // engine.spec.kv_format.block_size)
        engine.free(handle)
        assert found == payloads(engine, ids)[: len(found)]


async def read_prefix(exports: ExportRegistry, engine: Engine, ours: Try) -> bool:
    """Fetch the pages that an attempt has pinned; False if its export is over before. They are the named ones."""
    kv_format = engine.spec.kv_format
    expected = prefill(ours.named[: ours.cached]) if ours.cached else None
    try:
        export = await exports.find(f"{ours.key}/prefix", exports.incarnation)
        kv_slice = KvSlice(range(export.tokens), range(kv_format.layers), range(kv_format.heads))
        async with contextlib.aclosing(export.frames(kv_slice)) as stream:
            frames = [wire.decode(frame, wire.seed_of(export.transfer_id)) async for frame in stream]
    except (NotFound, TransferError):
        return False
    *data, manifest, commit = frames
    assert isinstance(manifest, Manifest)
    last = digests(engine, ours.named[: ours.cached])[-1]
    assert commit == Commit(ours.cached, 0, None, (kv_format.whole,), last)
    for frame in data:
        assert isinstance(frame, wire.KvData)
        whole = expected.layers[frame.layer]
        assert [bytes(part.data) for part in frame.parts] == [bytes(part.data) for part in whole]
    return True
