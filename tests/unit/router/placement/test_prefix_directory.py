"""Uses of a router's prefix indexes: placement, digests for decode, and a tier for people."""

import pytest

from baton.kv.hashing import NAME_BYTES, PackedDigests
from baton.worker.status import PrefixChange, WorkerRole
from router.placement.prefix_directory import EXPECTED_S, NO_MATCH, BlockNamespace, PrefixDirectory

ONE, OTHER = BlockNamespace("m", "f" * 64, 16), BlockNamespace("m", "e" * 64, 4)
DIGESTS = {
    form: PackedDigests(b"".join(bytes([n, i] * 16) for i in range(40 * n * n))) for n, form in ((1, ONE), (2, OTHER))
}


def news(namespace: BlockNamespace, count: int) -> PrefixChange:
    return PrefixChange(True, tuple(digest[:NAME_BYTES] for digest in DIGESTS[namespace][:count]), ())


def test_workers_of_different_formats_are_found_by_their_own_names() -> None:
    directory = PrefixDirectory()
    directory.update(WorkerRole.DECODE, "a", news(ONE, 2))
    directory.update(WorkerRole.DECODE, "b", news(OTHER, 3))
    match = directory.match_decode(DIGESTS)
    assert (match.tokens("a"), match.tokens("b"), match.tokens("c")) == (32, 12, 0)
    assert [(tokens, set(names)) for tokens, names in match.levels] == [(32, {"a"}), (12, {"b"})]
    assert directory.match_prefill(DIGESTS).tokens("a") == 0
    assert directory.match_decode({}) == NO_MATCH


def test_decode_is_sent_the_digests_of_what_it_is_thought_to_hold_and_some_more() -> None:
    directory = PrefixDirectory()
    assert directory.digests_to_pin("a", ONE, DIGESTS) == b""
    directory.update(WorkerRole.DECODE, "a", news(ONE, 2))
    assert directory.digests_to_pin("a", ONE, DIGESTS) == b"".join(DIGESTS[ONE][:18])
    assert (
        directory.digests_to_pin("b", ONE, DIGESTS)
        == directory.digests_to_pin("a", None, DIGESTS)
        == directory.digests_to_pin("a", ONE, {})
        == b""
    )
    directory.forget(WorkerRole.DECODE, "a")
    assert directory.digests_to_pin("a", ONE, DIGESTS) == b""


@pytest.mark.parametrize("writes", [True, False])
async def test_sent_blocks_are_expected_for_a_while_and_counted(writes: bool) -> None:
    now = 0.0
    directory = PrefixDirectory(lambda: now)
    directory.update(WorkerRole.PREFILL, "a", news(ONE, 10))
    directory.expect("a", ONE, DIGESTS, 160, writes=writes)
    directory.expect("a", None, DIGESTS, 0, writes=writes)
    assert directory.match_prefill(DIGESTS).tokens("a") == (640 if writes else 160)
    now = EXPECTED_S
    assert directory.match_prefill(DIGESTS).tokens("a") == 160
    (tier,) = await directory.tiers()
    assert (tier.name, tier.blocks, tier.hits, tier.misses, tier.state) == ("index", 10, 10, 30, "")


async def test_a_block_of_a_mixed_worker_is_counted_once() -> None:
    directory = PrefixDirectory()
    directory.update(WorkerRole.MIXED, "a", news(ONE, 10))
    directory.update(WorkerRole.PREFILL, "b", news(ONE, 3))
    directory.update(WorkerRole.DECODE, "c", news(ONE, 4))
    (tier,) = await directory.tiers()
    assert tier.blocks == 17
