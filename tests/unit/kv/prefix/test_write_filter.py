"""Counts of blocks that were seen, and the choice of those to store: bounded, the oldest are forgotten."""

from baton.kv.prefix.write_filter import BlockState, WriteFilter

DIGESTS = [bytes([index]) * 32 for index in range(10)]


def test_the_filter_forgets_the_oldest() -> None:
    write_filter = WriteFilter(max_blocks=4)
    assert list(write_filter.observe(DIGESTS[:2])) == [BlockState.ONCE] * 2
    assert list(write_filter.observe(DIGESTS[1:3])) == [BlockState.AGAIN, BlockState.ONCE]
    write_filter.mark_stored(DIGESTS[3:8])
    assert list(write_filter.observe(DIGESTS[3:8])) == [BlockState.STORED] * 5
    assert write_filter.state(DIGESTS[0]) is BlockState.NEVER
    write_filter.mark_missed(DIGESTS[6:])
    assert [write_filter.state(digest) for digest in DIGESTS[5:9]] == [
        BlockState.STORED,
        BlockState.AGAIN,
        BlockState.AGAIN,
        BlockState.NEVER,
    ]
    write_filter.clear()
    assert list(write_filter.observe(DIGESTS[5:6])) == [BlockState.ONCE]
