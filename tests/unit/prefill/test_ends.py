"""Which ends of prompts are looked for and kept: no question without a reason, and no put at first sight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from baton.engine.fake import FakeEngine
from baton.kv.prefix import MemoryPrefixCache, Payload, PrefixCache
from baton.kv.prefix.contract import Hits
from baton.kv.prefix.end import PromptEnd
from baton.kv.prefix.host import HostPrefixCache
from baton.kv.prefix.tiered import TieredPrefixCache
from baton.lifecycle import Lifecycle, State
from baton.request import SamplingParams
from baton.worker.blocks import Blocks
from prefill_svc.ends import AT_ONCE, Ends
from prefill_svc.job import Job, PrefillTask, SharedPages
from prefill_svc.scheduler import Work
from tests.contract.engines import ignore

IDS = [(7 * i) % 1000 for i in range(100)]
GREEDY = SamplingParams(temperature=0.0)


class Store(MemoryPrefixCache):
    """Notes what it is asked and given."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[list[bytes], bytes]] = []
        self.fetched: list[list[bytes]] = []
        self.puts: list[bytes] = []

    async def lookup(self, digests: Sequence[bytes], end: bytes = b"") -> Hits:
        self.asked.append((list(digests), end))
        return await super().lookup(digests, end)

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        self.fetched.append(list(digests))
        return await super().fetch(digests)

    def put(self, digest: bytes, payload: Payload) -> bool:
        self.puts.append(digest)
        return super().put(digest, payload)


class Rig:
    """A worker's ends over one cache, and jobs for them."""

    def __init__(
        self, cache: PrefixCache, pays: Callable[[Hits], bool] = lambda _: True, engine: FakeEngine | None = None
    ) -> None:
        self.engine = engine or FakeEngine()
        self.blocks = Blocks(self.engine, cache)
        self.ends = Ends(cache, self.blocks, pays)

    def job(self, ids: list[int] = IDS, salt: bytes = b"") -> Job:
        task = PrefillTask("r", 1, "", ids, (), (0,), GREEDY, cache_salt=salt)
        job = Job(task, Work(len(ids), 0, 0.0, 0), ids, 0.0, Lifecycle(State.QUEUED, 0.0))
        job.digests = self.blocks.digests(ids, salt)
        return job

    def name(self, ids: list[int] = IDS, salt: bytes = b"") -> bytes:
        return self.blocks.end_name(ids, self.blocks.digests(ids, salt), salt)

    async def asked(self, ids: list[int] = IDS, pool: int = 0) -> tuple[Hits, PromptEnd | None]:
        """A look-up of which the pool has the first `pool` blocks."""
        job = self.job(ids)
        return await self.ends.look_up(job, job.digests[pool:])

    async def computed(self, ids: list[int] = IDS, found: int = 0, salt: bytes = b"", used: bool = False) -> None:
        """The end of a job of which `found` tokens were found; all of it, and its end, if `used`."""
        job = self.job(ids, salt)
        handle = self.engine.reserve("r", len(ids))
        result = self.engine.prefill_chunk(handle, ids, 0, len(ids), on_layer=ignore, sample=job.task.states())
        job.pages = SharedPages(handle, lambda: self.engine.free(handle))
        job.sources = [("pool", found)] if found else []
        await self.ends.write_back(job, b"" if used else result.hidden)
        job.pages.release()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def rig(store: Store) -> Rig:
    return Rig(store)


async def test_an_end_is_put_when_it_is_computed_the_second_time(rig: Rig, store: Store) -> None:
    digests = rig.job().digests
    await rig.computed()
    assert store.puts == digests
    await rig.computed(found=96)
    assert store.puts == [*digests, rig.name()]
    await rig.computed(found=96)
    assert store.puts == [*digests, rig.name()]


@pytest.mark.parametrize("tail", [0, 4])
@pytest.mark.parametrize(("found", "at_once"), [(0, True), (16, False), (15, True)])
async def test_behind_many_new_blocks_it_is_put_at_once(
    rig: Rig, store: Store, found: int, at_once: bool, tail: int
) -> None:
    """Whoever found a block computed one less."""
    ids = [*range(AT_ONCE * 16 + tail)]
    await rig.computed(ids, found=found)
    assert (rig.name(ids) in store.blocks) == at_once
    await rig.computed(ids, found=len(ids) - 1)
    assert rig.name(ids) in store.blocks
    assert store.puts.count(rig.name(ids)) == 1


async def test_one_that_is_put_at_once_is_counted_as_computed(rig: Rig, store: Store) -> None:
    """If it is lost, the next computation puts it again, though all its blocks are there."""
    ids = [*range(AT_ONCE * 16 + 4)]
    await rig.computed(ids)
    del store.blocks[rig.name(ids)]
    await rig.computed(ids, found=AT_ONCE * 16)
    assert rig.name(ids) in store.blocks


async def test_one_block_less_than_many_is_not_many(rig: Rig, store: Store) -> None:
    ids = [*range(AT_ONCE * 16 - 1)]
    await rig.computed(ids)
    assert len(store.puts) == AT_ONCE - 1
    assert rig.name(ids) not in store.blocks


@pytest.mark.parametrize(("writes", "times"), [("first", 1), ("second", 2), ("never", 0)])
async def test_a_store_gets_the_end_of_a_long_prompt_with_its_blocks(store: Store, writes: str, times: int) -> None:
    rig = Rig(TieredPrefixCache(HostPrefixCache(0), store, writes, touch_share=0.0))
    ids = [*range(AT_ONCE * 16 + 4)]
    for time in (1, 2, 3):
        await rig.computed(ids, found=0 if time == 1 else AT_ONCE * 16)
        assert (rig.name(ids) in store.blocks) == (0 < times <= time)
        assert (len(store.puts) > 0) == (0 < times <= time)


@pytest.mark.parametrize("length", [1, 15, 16, 96])
async def test_an_end_of_any_length_is_put_the_second_time(rig: Rig, store: Store, length: int) -> None:
    ids = IDS[:length]
    for put in (False, True):
        await rig.computed(ids)
        assert (rig.name(ids) in store.blocks) == put


async def test_each_prompt_and_salt_is_counted_by_itself(rig: Rig, store: Store) -> None:
    await rig.computed()
    for ids, salt in ((IDS[:99], b""), ([*IDS, 1], b""), (IDS[:96], b""), (IDS, b"salt")):
        await rig.computed(ids, salt=salt)
        assert rig.name(ids, salt) not in store.blocks
    await rig.computed()
    assert rig.name() in store.blocks


async def test_an_end_that_was_used_was_not_computed(rig: Rig, store: Store) -> None:
    await rig.computed()
    for _ in range(3):
        await rig.computed(found=96, used=True)
    assert rig.name() not in store.blocks
    await rig.computed(found=96)
    assert rig.name() in store.blocks


async def test_a_job_without_pages_puts_nothing(rig: Rig, store: Store) -> None:
    for _ in range(2):
        await rig.ends.write_back(rig.job(), b"hidden")
    assert store.puts == []


async def test_an_end_is_looked_for_along_with_blocks(rig: Rig, store: Store) -> None:
    for _ in range(2):
        await rig.computed()
    digests = rig.job().digests
    for pool in (0, 3):
        store.asked, store.fetched = [], []
        hits, end = await rig.asked(pool=pool)
        assert store.asked == [(digests[pool:], rig.name())]
        assert store.fetched == [[rig.name()]], "the blocks are fetched later, if they are worth it"
        assert hits == Hits((("memory", 7 - pool),))
        assert end is not None
        assert len(end.kv) == 4 * rig.engine.spec.kv_format.token_bytes
        assert len(end.hidden) == rig.engine.spec.hidden_bytes


@pytest.mark.parametrize(("length", "pool"), [(100, 6), (15, 0), (96, 6)])
async def test_the_end_alone_is_looked_for_in_host_memory(store: Store, length: int, pool: int) -> None:
    rig, ids = Rig(TieredPrefixCache(HostPrefixCache(1 << 20), store, touch_share=0.0)), IDS[:length]
    await rig.computed(ids)
    assert await rig.asked(ids, pool) == (Hits(), None)
    await rig.computed(ids, found=length - 1)
    hits, end = await rig.asked(ids, pool)
    assert hits == Hits((("host", 1),))
    assert end is not None
    assert store.asked == store.fetched == []


@pytest.mark.parametrize(("length", "pool"), [(100, 6), (15, 0), (96, 6)])
async def test_the_end_alone_is_not_looked_for_in_a_store(store: Store, length: int, pool: int) -> None:
    rig, ids = Rig(TieredPrefixCache(HostPrefixCache(0), store, touch_share=0.0)), IDS[:length]
    for _ in range(2):
        await rig.computed(ids)
    assert rig.name(ids) in store.blocks
    assert await rig.asked(ids, pool) == (Hits(), None)
    assert store.asked == store.fetched == []


async def test_an_end_that_another_worker_put_is_found_again_and_again(store: Store) -> None:
    """From the first time on the pages have the blocks, and host memory has the end."""
    rig, other = (Rig(TieredPrefixCache(HostPrefixCache(1 << 20), store, touch_share=0.0)) for _ in range(2))
    for _ in range(2):
        await rig.computed()
    store.asked = []
    for pool, hits in ((0, Hits((("memory", 7),))), *[(6, Hits((("host", 1),)))] * 3):
        found, end = await other.asked(pool=pool)
        assert found == hits
        assert end is not None
        await other.computed(found=96, used=True)
    assert store.asked == [(rig.job().digests, rig.name())]
    assert store.fetched == [[rig.name()]]


async def test_an_end_comes_from_its_own_tier(store: Store) -> None:
    """Host memory has blocks, the store has the rest and the end, which another worker has put."""
    rig, other = (Rig(TieredPrefixCache(HostPrefixCache(memory), store, touch_share=0.0)) for memory in (1 << 20, 0))
    for _ in range(2):
        await other.computed()
    await rig.computed(IDS[:80])
    hits, end = await rig.asked(pool=2)
    assert hits == Hits((("host", 3), ("memory", 2)))
    assert end is not None
    store.asked = []
    await rig.computed(IDS[:96])
    assert (await rig.asked(IDS[:97], pool=2)) == (Hits((("host", 4),)), None)
    assert store.asked == []


async def test_an_end_behind_a_block_that_is_missing_is_not_fetched(rig: Rig, store: Store) -> None:
    for _ in range(2):
        await rig.computed()
    del store.blocks[rig.job().digests[3]]
    assert await rig.asked() == (Hits((("memory", 3),)), None)
    assert store.fetched == []


async def test_an_end_is_not_fetched_if_the_hits_are_not_worth_it(store: Store) -> None:
    asked: list[Hits] = []

    def pays(hits: Hits) -> bool:
        asked.append(hits)
        return False

    rig = Rig(store, pays)
    await rig.computed()
    assert await rig.asked() == (Hits((("memory", 6),)), None)
    assert asked == [], "there is none"
    await rig.computed(found=96)
    assert await rig.asked(pool=2) == (Hits((("memory", 5),)), None)
    assert asked == [Hits((("memory", 5),))], "with the end"
    assert store.fetched == []


async def test_an_end_that_does_not_fit_a_block_is_neither_looked_for_nor_put(store: Store) -> None:
    engine = FakeEngine()
    room = 12 * engine.spec.kv_format.token_bytes
    engine._spec = replace(engine.spec, hidden_bytes=room + 1)
    rig = Rig(store, engine=engine)
    for _ in range(3):
        await rig.computed()
    assert await rig.asked() == (Hits((("memory", 6),)), None)
    assert store.asked == [(rig.job().digests, b"")]
    assert (store.puts, store.fetched) == (rig.job().digests, [])


async def test_an_end_that_is_gone_is_put_when_computed_next(rig: Rig, store: Store) -> None:
    for _ in range(2):
        await rig.computed()
    del store.blocks[rig.name()]
    assert await rig.asked(pool=6) == (Hits(), None)
    await rig.computed(found=96)
    assert rig.name() in store.blocks
    assert (await rig.asked(pool=6))[1] is not None


class Losing(Store):
    """Finds all, and gives nothing."""

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        return []


async def test_an_end_that_goes_between_look_up_and_fetch_is_a_miss() -> None:
    rig = Rig(Losing())
    for _ in range(2):
        await rig.computed()
    hits, end = await rig.asked()
    assert end is None
    assert hits.first(6) == Hits((("memory", 6),)), "its blocks are not"


@pytest.mark.parametrize("memory", [0, 1 << 20])
@pytest.mark.parametrize(("writes", "stored"), [("first", 2), ("second", 3), ("never", 0)])
async def test_stores_get_ends_as_they_get_blocks(store: Store, writes: str, memory: int, stored: int) -> None:
    """It is put the second time; "second" takes it at its next use, from host memory, or computation."""
    rig = Rig(TieredPrefixCache(HostPrefixCache(memory), store, writes, touch_share=0.0))
    for times in (1, 2, 3, 4):
        await rig.computed(found=96 if times > 1 else 0, used=bool(memory) and times > 2)
        assert (rig.name() in store.blocks) == (0 < stored <= times), f"after {times}"
    assert store.puts.count(rig.name()) == (stored > 0)
    hits, end = await rig.asked(pool=6)
    assert (end is not None, hits.blocks) == (bool(memory), bool(memory))
    assert store.asked == []
