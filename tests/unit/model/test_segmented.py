"""Attention over KV in host memory equals attention over all of it at once, for any segments and any way to them."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kv.format import KEYS, VALUES, attention_parts
from baton.model.attention import (
    AttentionBackend,
    AttentionBatch,
    HostKv,
    KvCache,
    SegmentedAttention,
    SegmentRing,
    SegmentSource,
    SegmentViews,
    segments,
)
from baton.model.attention.flash_backend import FlashAttention
from baton.model.attention.segmented import merge
from baton.model.attention.segments import Segment, split
from baton.model.attention.torch_backend import TorchAttention, attend_segment
from tests.unit.engine.cuda_standin import Cuda, Event, Stream, cuda
from tests.unit.model.attention_contract import (
    LAYERS,
    Case,
    block_cases,
    cases,
    check,
    decode_cases,
    in_dtypes,
    sharp_cases,
)
from tests.unit.model.flash_standin import KERNELS
from tests.unit.model.varlen_standin import VARLEN

__all__ = ["cuda"]

CPU = torch.device("cpu")
Source = Callable[[KvCache], SegmentSource]


class Hosted:
    """A backend whose rows all count as in host memory, but for every `every`-th if that is set."""

    name = "hosted"

    def __init__(self, source: Source, inner: AttentionBackend | None = None, every: int = 0) -> None:
        self._source = source
        self._inner = inner or TorchAttention()
        self._every = every
        self._pass: SegmentedAttention | None = None
        self._host: HostKv | None = None

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        rows = [row for row in range(len(batch.query_lens)) if not self._every or row % self._every]
        self._host = HostKv({row: batch.page_tables[row].tolist() for row in rows}, self._source(kv))
        self._pass = SegmentedAttention(self._inner, self._host, [None] * LAYERS)
        self._pass.append(kv, layer, k, v, self._hosted(batch))

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        return self._pass.attend(kv, layer, q, self._hosted(batch), window)

    def attend_segment(
        self, q: Tensor, k: Tensor, v: Tensor, distance: int, window: int | None
    ) -> tuple[Tensor, Tensor]:
        return self._inner.attend_segment(q, k, v, distance, window)

    def _hosted(self, batch: AttentionBatch) -> AttentionBatch:
        return AttentionBatch.build(
            batch.query_lens, batch.context_lens, batch.page_tables, batch.page_size, self._host
        )


def views(size: int) -> Source:
    return lambda kv: SegmentViews(kv, size)


def ring(size: int) -> Source:
    return lambda kv: SegmentRing(kv, CPU, 2, size)


FEW = [*cases((16,))[::3], *block_cases()[::7], *decode_cases()[::7]]


@pytest.mark.parametrize(("size", "every"), [(16, 0), (50, 2), (1000, 0), (1000, 2)])
def test_segments_equal_dense_attention(size: int, every: int) -> None:
    for case in FEW:
        check(Hosted(views(size), every=every), case, CPU, tolerance=2e-5)
    for case in sharp_cases():
        check(Hosted(views(size), every=every), case, CPU, tolerance=2e-4)


def test_a_ring_of_two_buffers_equals_dense_attention(cuda: Cuda) -> None:
    for case in FEW:
        check(Hosted(ring(50), every=3), case, CPU, tolerance=2e-5)


@pytest.mark.parametrize("inner", [FlashAttention(KERNELS), VARLEN], ids=lambda inner: inner.name)
def test_flash_attention_takes_segments(inner: AttentionBackend) -> None:
    for case in in_dtypes(FEW, torch.bfloat16, torch.bfloat16):
        check(Hosted(views(50), inner), case, CPU, tolerance=3e-2)


@pytest.mark.parametrize("chunk", [12, 40])
def test_new_tokens_are_attended_in_the_dtype_of_the_pages(chunk: int) -> None:
    parts = attention_parts("bfloat16", 2, 16)
    q, k, v = (torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    found = []
    for backend in (TorchAttention(), Hosted(views(16))):
        kv = KvCache.allocate(parts, num_layers=LAYERS, num_pages=5, page_size=8, device=CPU)
        for begin in range(0, 40, chunk):
            end = min(begin + chunk, 40)
            batch = AttentionBatch.build([end - begin], [end], torch.arange(5, dtype=torch.int32)[None], 8)
            backend.append(kv, 0, k[begin:end], v[begin:end], batch)
            found.append(backend.attend(kv, 0, q[begin:end], batch, None))
    plain, hosted = torch.cat(found).chunk(2)
    torch.testing.assert_close(hosted, plain, rtol=2e-5, atol=2e-5)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_merged_segments_equal_plain_attention_in_float64(data: st.DataObject) -> None:
    group, kv_heads, dim = (data.draw(st.integers(1, most)) for most in (4, 3, 9))
    context = data.draw(st.integers(1, 90))
    queries = data.draw(st.integers(1, context))
    size = data.draw(st.integers(1, 100))
    window = data.draw(st.none() | st.integers(1, 100))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    q, k, v = (
        torch.randn(count, heads, dim, dtype=torch.float64, generator=random) * data.draw(st.sampled_from((1, 30)))
        for count, heads in ((queries, group * kv_heads), (context, kv_heads), (context, kv_heads))
    )
    begin = context - queries
    merged = attend_segment(q, k[begin:], v[begin:], 0, window)
    for segment in split(0, 0, (), range(begin), size):
        at = slice(segment.tokens.start, segment.tokens.stop)
        merged = merge(merged, attend_segment(q, k[at], v[at], begin - segment.tokens.start, window))
    plain, lse = attend_segment(q, k, v, begin, window)
    torch.testing.assert_close(merged[0], plain, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(merged[1], lse, rtol=1e-11, atol=1e-11)
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    apart = torch.arange(begin, context)[:, None] - torch.arange(context)
    mask = (apart >= 0) & (apart < (window or context))
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, mask)
    torch.testing.assert_close(plain, expected.transpose(0, 1), rtol=1e-11, atol=1e-11)


def test_pages_that_follow_each_other_are_views_and_others_are_put_together() -> None:
    case = Case(page_size=4)
    shape = (LAYERS, 10, case.page_size, case.kv_heads, case.head_dim)
    kv = KvCache({part: torch.randn(shape) for part in (KEYS, VALUES)})
    source = SegmentViews(kv, 8)
    (segment,) = split(1, 0, (5, 6, 2), range(1, 8), 8)
    keys, _ = source.open(segment)
    assert keys.data_ptr() == kv.parts[KEYS][1, 5, 1].data_ptr()
    assert torch.equal(keys, kv.parts[KEYS][1, 5:7].flatten(0, 1)[1:])
    (segment,) = split(1, 0, (5, 2), range(8), 8)
    _, values = source.open(segment)
    assert torch.equal(values, kv.parts[VALUES][1, [5, 2]].flatten(0, 1))


def test_a_ring_reads_pages_of_both_homes_and_fetches_ahead(cuda: Cuda) -> None:
    shape = (LAYERS, 4, 2, 1, 3)
    parts, host = ({part: torch.randn(shape) for part in (KEYS, VALUES)} for _ in range(2))
    source = SegmentRing(KvCache(parts, host, 3), CPU, 2, 4)
    pages = (2, 3, 5, 0)
    first, second, third = split(1, 0, pages, range(1, 8), 3)
    keys, _ = source.open(first)
    source.prefetch(second)
    expected = torch.cat([parts[KEYS][1, 2], host[KEYS][1, 0], host[KEYS][1, 2], parts[KEYS][1, 0]])
    assert torch.equal(keys, expected[1:3])
    # Both buffers are in use.
    source.prefetch(third)
    assert torch.equal(keys, expected[1:3])
    source.close(first)
    assert torch.equal(source.open(second)[0], expected[3:6])
    source.prefetch(third)
    source.close(second)
    # Something else comes next than what was fetched ahead, twice.
    source.prefetch(split(0, 0, pages, range(2), 4)[0])
    assert torch.equal(source.open(second)[0], expected[3:6])
    source.close(second)
    source.end()
    assert torch.equal(source.open(third)[0], expected[6:8])


def test_a_copy_into_a_ring_waits_for_what_it_reads_and_writes(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (LAYERS, 4, 2, 1, 3)
    parts, host = ({part: torch.randn(shape) for part in (KEYS, VALUES)} for _ in range(2))
    source = SegmentRing(KvCache(parts, host, 3), CPU, 2, 2)
    log = list[tuple[str, Stream, object]]()
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: log.append(("wait", stream, event)))
    monkeypatch.setattr(Event, "record", lambda event, stream: log.append(("record", stream, event)))
    monkeypatch.setattr(segments, "_copy", lambda room, _: log.append(("copy", cuda.current, room.data_ptr())))
    kv = torch.randn(2, 1, 3)
    source.store(1, (3, 4, 5), range(2), kv, kv)
    stored = log.pop()[2]
    first, second, third = split(1, 0, (3, 4, 5), range(6), 2)
    source.open(first)
    buffer = [what for _, _, what in log if isinstance(what, int)]
    source.close(first)
    read = log[-1][2]
    source.open(second)
    source.close(second)
    log.clear()
    keys, values = source.open(third)
    assert [keys.data_ptr(), values.data_ptr()] == buffer, "the buffer of the first segment"
    inward, ready = source._in, log[-1][2]
    assert cuda.main is not inward
    assert log == [
        ("wait", inward, read),
        ("wait", inward, stored),
        *(("copy", inward, room) for room in buffer),
        ("record", inward, ready),
        ("wait", cuda.main, ready),
    ]


@pytest.mark.parametrize(
    ("windows", "first"), [((4, None), range(8)), ((None, 4), range(13, 16)), ((4, 1), None), ((1, None), range(8))]
)
def test_the_next_layers_segment_is_of_its_own_window(windows: tuple[int | None, ...], first: range | None) -> None:
    class Watched(SegmentViews):
        def prefetch(self, segment: Segment) -> None:
            if segment.layer > layer:
                fetched.add(segment.tokens)

        def open(self, segment: Segment) -> tuple[Tensor, Tensor]:
            opened.setdefault(segment.layer, segment.tokens)
            return super().open(segment)

    fetched, opened = set[range](), dict[int, range]()
    kv = KvCache.allocate(attention_parts("float32", 1, 3), num_layers=2, num_pages=5, page_size=8, device=CPU)
    host = HostKv({0: range(5)}, Watched(kv, 8))
    batch = AttentionBatch.build([8], [24], torch.arange(5, dtype=torch.int32)[None], 8, host)
    attention = SegmentedAttention(TorchAttention(), host, windows)
    for layer, window in enumerate(windows):
        x = torch.randn(8, 1, 3)
        attention.append(kv, layer, x, x, batch)
        attention.attend(kv, layer, x, batch, window)
    assert opened.get(1) == first
    assert fetched == ({first} if first else set())


def test_new_kv_goes_to_the_pages_of_both_homes(cuda: Cuda) -> None:
    shape = (LAYERS, 4, 2, 1, 3)
    parts, host = ({part: torch.zeros(shape) for part in (KEYS, VALUES)} for _ in range(2))
    kv = KvCache(parts, host, 3)
    k, v = torch.randn(2, 4, 1, 3).unbind()
    SegmentRing(kv, CPU, 2, 4).store(1, (2, 3, 5), range(1, 5), k, v)
    for part, values in ((KEYS, k), (VALUES, v)):
        assert torch.equal(torch.cat([parts[part][1, 2], host[part][1, 0], host[part][1, 2]])[1:5], values)
        assert parts[part].count_nonzero() + host[part].count_nonzero() == values.numel()
