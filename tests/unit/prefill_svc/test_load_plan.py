"""From where a prefix is loaded."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.fake import FakeEngine
from baton.errors import TransferError
from baton.kv.prefix.contract import FetchRate, Hits
from baton.request import PrefixSource, RemoteExport
from baton.transfer.fetcher import ExportFetcher
from prefill_svc import prefix
from prefill_svc.prefix import PeerFetcher, TierRun, add_peer, cached_runs, common_blocks, to_hits, truncate

HITS = Hits((("host", 2), ("redis", 3)))
SLOW, QUICK = FetchRate(0.001, 1e6), FetchRate(0.0, 1e9)


@pytest.mark.parametrize(
    ("have", "runs"),
    [
        (4, [("host", 4, 6), ("redis", 6, 9)]),
        (5, [("host", 5, 6), ("redis", 6, 9)]),
        (6, [("redis", 6, 9)]),
        (8, [("redis", 8, 9)]),
        (9, []),
        (20, []),
        (3, []),
    ],
)
def test_hits_count_from_where_the_pages_end(have: int, runs: list[tuple[str, int, int]]) -> None:
    assert cached_runs(HITS, 4, have) == [TierRun(tier, range(start, stop)) for tier, start, stop in runs]


def plan(held: int, **rates: FetchRate) -> list[tuple[str, int, int]]:
    runs = add_peer(cached_runs(HITS, 4, 4), 4, held, rates, 1000)
    assert all(first.blocks.stop == second.blocks.start for first, second in itertools.pairwise(runs))
    return [(run.tier, run.blocks.start, run.blocks.stop) for run in runs]


def test_a_peer_gives_what_is_beyond_the_hits() -> None:
    assert plan(12) == [("host", 4, 6), ("redis", 6, 9), ("peer", 9, 12)]
    assert plan(9) == [("host", 4, 6), ("redis", 6, 9)]
    assert plan(0) == [("host", 4, 6), ("redis", 6, 9)]
    assert add_peer([], 2, 5, {}, 1000) == [TierRun("peer", range(2, 5))]
    assert add_peer([], 5, 5, {}, 1000) == []


def test_a_peer_known_to_be_quicker_stands_in_for_a_store() -> None:
    assert plan(12, peer=QUICK, redis=SLOW) == [("host", 4, 6), ("peer", 6, 12)]
    assert plan(8, peer=QUICK, redis=SLOW) == [("host", 4, 6), ("peer", 6, 8), ("redis", 8, 9)]
    assert plan(12, peer=QUICK, redis=SLOW, host=SLOW) == [("peer", 4, 12)]
    assert plan(12, peer=SLOW, redis=QUICK) == [("host", 4, 6), ("redis", 6, 9), ("peer", 9, 12)]
    assert plan(12, peer=QUICK) == [("host", 4, 6), ("redis", 6, 9), ("peer", 9, 12)]


def test_a_plan_is_cut_to_its_leading_blocks() -> None:
    runs = cached_runs(HITS, 4, 4)
    assert to_hits(runs) == HITS
    assert to_hits(truncate(runs, 5)) == HITS
    assert truncate(runs, 3) == [TierRun("host", range(4, 6)), TierRun("redis", range(6, 7))]
    assert truncate(runs, 2) == [TierRun("host", range(4, 6))]
    assert truncate(runs, 0) == []


def test_chains_have_their_beginning_in_common() -> None:
    chain = [bytes([i]) for i in range(9)]
    for common in range(10):
        other = [*chain[:common], *(b"other" for _ in chain[common:])]
        assert common_blocks(chain, other) == common_blocks(other, chain) == common
        assert common_blocks(chain, chain[:common]) == common


async def test_the_rate_of_peers_counts_fetches_that_fail_but_not_those_that_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, now = FakeEngine(), [0.0]
    monkeypatch.setattr(prefix, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ends: list[BaseException | None] = [None, asyncio.CancelledError(), TransferError("is gone")]

    async def fetch(*_: Any, **__: Any) -> None:
        now[0] += 0.5
        if (error := ends.pop(0)) is not None:
            raise error

    monkeypatch.setattr(ExportFetcher, "fetch_prefix", fetch)
    peers, handle = PeerFetcher(engine, None, "prefill", 1.0), engine.reserve("r", 64)
    source = PrefixSource(RemoteExport("t", "i", ()), 64)
    assert await peers.fetch(handle, source, range(64), b"")
    rate = FetchRate(0.0, 64 * engine.spec.kv_format.token_bytes / 0.5)
    assert peers.rate == rate
    with pytest.raises(asyncio.CancelledError):
        await peers.fetch(handle, source, range(64), b"")
    assert peers.rate == rate
    assert not await peers.fetch(handle, source, range(64), b"")
    assert peers.rate is not None
    assert peers.rate.bytes_per_s < rate.bytes_per_s
    await peers.close()
