"""Steps over working copies equal the reference over pages, whatever joins, leaves, grows, fails or finds no room."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from baton.model.attention import AttentionBatch, KvCache, ResidentKv
from baton.model.attention.reference import ReferenceAttention
from baton.model.attention.torch_backend import TorchAttention

LAYERS, PAGES, PAGE, HEADS, KV_HEADS, HEAD_DIM = 3, 400, 16, 4, 2, 8
SLOT_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
ROOMY = 1 << 30


@dataclass(eq=False)
class Running:
    """A sequence with its pages, of which the last context that was attended is `length`."""

    pages: list[int]
    length: int


@dataclass
class Runner:
    """Steps of an engine, by one backend: pages are given back as NaN, and taken again in any order.

    With `runs` a sequence takes the page after its last one where that is free.
    """

    limit: int = ROOMY
    seed: int = 0
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    runs: bool = False
    backend: TorchAttention = field(default_factory=TorchAttention)
    sequences: list[Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.kv = KvCache.allocate(
            num_layers=LAYERS,
            num_pages=PAGES,
            page_size=PAGE,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=self.kv_dtype,
            device=torch.device("cpu"),
        )
        for part in self.kv.parts.values():
            part.fill_(float("nan"))
        self.free = list(range(PAGES))
        self.resident = ResidentKv(self.kv, self.limit)

    def join(self, length: int) -> Running:
        """A sequence whose first `length` tokens are in its pages."""
        one = Running([], length)
        self._grow(one, length)
        for part in self.kv.parts.values():
            for layer in part:
                slots = self._slots(one, length)
                layer.flatten(0, 1)[slots] = self._random(length, KV_HEADS, HEAD_DIM).to(self.kv_dtype)
        self.sequences.append(one)
        return one

    def leave(self, one: Running) -> None:
        """Its pages go to others, and hold NaN until these have written them."""
        self.sequences[self.sequences.index(one)] = self.sequences[-1]
        self.sequences.pop()
        for part in self.kv.parts.values():
            part[:, one.pages] = float("nan")
        self.free += one.pages

    def step(
        self,
        window: Callable[[int], int | None] = lambda _layer: None,
        fails_after: int = LAYERS,
        tolerance: float = 2e-5,
    ) -> list[Tensor]:
        """A token more for each, compared with the reference layer by layer; none if it ends after `fails_after`."""
        for one in self.sequences:
            self._grow(one, one.length + 1)
        contexts = [one.length + 1 for one in self.sequences]
        tables = torch.zeros(len(contexts), max(len(one.pages) for one in self.sequences), dtype=torch.int32)
        for table, one in zip(tables, self.sequences, strict=True):
            table[: len(one.pages)] = torch.tensor(one.pages)
        positions = torch.tensor(contexts) - 1
        batch = AttentionBatch.step(contexts, positions, tables, PAGE, self.sequences, self.resident)
        paged = AttentionBatch.step(contexts, positions, tables, PAGE)
        found = []
        for layer in range(fails_after):
            q, k, v = (
                self._random(len(contexts), heads, HEAD_DIM).to(self.dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            self.backend.append(self.kv, layer, k, v, batch)
            found.append(self.backend.attend(self.kv, layer, q, batch, window(layer)))
            expected = ReferenceAttention().attend(self.kv, layer, q, paged, window(layer))
            torch.testing.assert_close(found[-1], expected, rtol=tolerance, atol=tolerance)
            if layer == 0:
                torch.testing.assert_close(self.backend.attend(self.kv, layer, q, batch, window(layer)), found[-1])
        if fails_after == LAYERS:
            for one in self.sequences:
                one.length += 1
        return found

    def _grow(self, one: Running, length: int) -> None:
        while len(one.pages) * PAGE < length:
            page = one.pages[-1] + 1 if self.runs and one.pages else -1
            one.pages.append(page if page in self.free else self.draw.choice(self.free))
            self.free.remove(one.pages[-1])

    def _slots(self, one: Running, length: int) -> Tensor:
        places = torch.arange(length)
        return torch.tensor(one.pages)[places // PAGE] * PAGE + places % PAGE

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def copied(runner: Runner, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> int:
    """Tokens that `act` copied out of pages, of one layer and part and in all sequences together."""
    counts: list[int] = []
    gather = KvCache.gather

    def counting(kv: KvCache, part: str, layer: int, places: Tensor, out: Tensor) -> None:
        if (part, layer) == ("v", LAYERS - 1):
            counts.append(out.numel() // (KV_HEADS * HEAD_DIM))
        gather(kv, part, layer, places, out)

    with monkeypatch.context() as patch:
        patch.setattr(KvCache, "gather", counting)
        act()
    return sum(counts)


@pytest.mark.parametrize("limit", [ROOMY, 1500 * SLOT_BYTES, 300 * SLOT_BYTES, 0], ids=["roomy", "some", "few", "none"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("runs", [False, True], ids=["scattered", "runs"])
def test_any_course_equals_the_reference(seed: int, limit: int, runs: bool) -> None:
    runner = Runner(limit, seed, runs=runs)
    draw = random.Random(seed)
    for _ in range(25):
        while len(runner.sequences) < 2 - runs or (draw.random() < 0.3 and len(runner.free) > 80):
            runner.join(draw.choice([1, 2, 30, 62, 63, 64, 120, 127, 250, 500]))
        if draw.random() < 0.15:
            runner.step(fails_after=draw.randrange(LAYERS))
        if draw.random() < 0.1:
            draw.choice(runner.sequences).length -= draw.choice([0, 0, 1])
        runner.step()
        assert runner.resident.allocated <= limit
        while len(runner.sequences) > 1 and (draw.random() < 0.25 or len(runner.free) < 100):
            runner.leave(draw.choice(runner.sequences))


def test_a_step_copies_one_token_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    for length in (70, 300, 5, 290, 40):
        runner.join(length)
    assert copied(runner, monkeypatch, runner.step) > 705
    assert copied(runner, monkeypatch, runner.step) == 5
    runner.leave(runner.sequences[1])
    assert copied(runner, monkeypatch, runner.step) == 4
    runner.join(10)
    assert copied(runner, monkeypatch, runner.step) == 4 + 320


def test_one_alone_is_read_where_it_lies_and_copied_when_it_has_company(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(runs=True)
    runner.free = list(range(40))
    one = runner.join(50)
    assert runner.resident.allocated == copied(runner, monkeypatch, runner.step) == 0
    other = runner.join(45)
    assert copied(runner, monkeypatch, runner.step) == 2 * 64
    assert copied(runner, monkeypatch, runner.step) == 2
    runner.leave(other)
    assert [copied(runner, monkeypatch, runner.step) for _ in range(3)] == [0] * 3
    # What it missed meanwhile is copied with the rest.
    runner.join(45)
    assert copied(runner, monkeypatch, runner.step) == 2 * 64
    runner.leave(runner.sequences[1])
    # The page after its last one is another's: from then on it has a row.
    while one.pages[-1] + 1 in runner.free:
        runner.free.remove(one.pages[-1] + 1)
    tokens = [copied(runner, monkeypatch, runner.step) for _ in range(40)]
    assert tokens == [*[0] * 7, 128, *[1] * 32]


def test_what_is_read_in_place_leaves_no_copies() -> None:
    runner = Runner(runs=True)
    runner.free = list(range(400))
    for _ in range(20):
        runner.join(100)
    runner.step()
    assert runner.resident.allocated > 0
    for one in runner.sequences[1:]:
        runner.leave(one)
    runner.step()
    assert runner.resident.allocated == 0


def test_a_sequence_outgrows_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    for length in (62, 62, 60):
        runner.join(length)
    tokens = [copied(runner, monkeypatch, runner.step) for _ in range(5)]
    assert tokens == [3 * 64, 3, 1 + 2 * 128, 3, 2 + 128]


@pytest.mark.parametrize("done", range(LAYERS))
def test_layers_that_a_failed_pass_did_not_reach_lack_nothing(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    for length in (70, 20, 63):
        runner.join(length)
    runner.step(fails_after=done)
    for _ in range(3):
        runner.step()
    runner.leave(runner.sequences[0])
    runner.join(40)
    runner.step(fails_after=done)
    # Without a step between: the batch changes again, and rows move.
    runner.leave(runner.sequences[0])
    runner.join(64)
    runner.step()
    assert copied(runner, monkeypatch, runner.step) == 3


def test_a_sequence_that_got_shorter_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    one = runner.join(30)
    runner.join(31)
    for _ in range(3):
        runner.step()
    one.length -= 1
    assert copied(runner, monkeypatch, runner.step) == 2
    one.length -= 2
    for part in runner.kv.parts.values():
        part.flatten(1, 2)[:, runner._slots(one, 64 if len(one.pages) > 3 else 48)[one.length :]] = float("nan")
    assert copied(runner, monkeypatch, runner.step) == 64 + 1
    runner.step()


def test_pages_of_one_that_left_serve_another() -> None:
    runner = Runner()
    runner.free = list(range(8))
    for _ in range(6):
        first, second = runner.join(40), runner.join(17)
        for _ in range(3):
            runner.step()
        for one in (first, second):
            runner.leave(one)


def test_windowed_and_full_layers_share_a_step() -> None:
    runner = Runner()
    for length in (10, 90, 33):
        runner.join(length)
    windows = [None, 40, 95]
    for _ in range(8):
        runner.step(lambda layer: windows[layer])
    # Layer 2 has gathered since the longest outgrew its window, and reads copies again now that none does.
    runner.leave(runner.sequences[1])
    for _ in range(3):
        runner.step(lambda layer: windows[layer])


def test_large_batches_take_the_batched_kernels() -> None:
    runner = Runner(seed=3)
    for length in (500, 505, 480, 511, 400, 510, 499, 470, 90, 20):
        runner.join(length)
    for _ in range(14):
        runner.step()
    runner.leave(runner.sequences[0])
    for _ in range(3):
        runner.step()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [(torch.float32, torch.bfloat16, 2e-5), (torch.bfloat16, torch.bfloat16, 3e-2)],
)
def test_other_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, tolerance: float) -> None:
    runner = Runner(dtype=dtype, kv_dtype=kv_dtype)
    for length in (500, 505, 480, 511, 400, 510, 499, 470, 90, 20):
        runner.join(length)
    for _ in range(3):
        runner.step(tolerance=tolerance)


def test_memory_follows_the_batch() -> None:
    runner = Runner()
    for _ in range(20):
        runner.join(100)
    runner.step()
    full = runner.resident.allocated
    assert 20 * 128 * SLOT_BYTES <= full <= 30 * 128 * SLOT_BYTES
    while len(runner.sequences) > 2:
        runner.leave(runner.sequences[0])
        runner.step()
    assert runner.resident.allocated <= 4 * 2 * 128 * SLOT_BYTES
    runner.leave(runner.sequences[0])
    runner.leave(runner.sequences[0])
    runner.join(300)
    runner.step()
    assert runner.resident.allocated == 320 * SLOT_BYTES
    runner.resident.clear()
    assert runner.resident.allocated == 0
    runner.step()


def test_rows_that_nobody_uses_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = (4 * 64 + 300) * SLOT_BYTES
    runner = Runner(limit)
    for _ in range(4):
        runner.join(20)
    runner.step()
    runner.leave(runner.sequences[0])
    runner.join(600)
    # No room for 640 tokens, which are gathered in each step.
    runner.step()
    assert copied(runner, monkeypatch, runner.step) > 600
    runner.leave(runner.sequences[3])
    runner.join(300)
    runner.join(300)
    runner.step()
    assert copied(runner, monkeypatch, runner.step) in range(4 + 300, 4 + 400)
    assert runner.resident.allocated <= limit


def test_two_caches_with_one_backend() -> None:
    backend = TorchAttention()
    runners = [Runner(seed=seed, backend=backend) for seed in range(2)]
    for runner in runners:
        runner.join(50)
        runner.join(70)
    for _ in range(3):
        for runner in runners:
            runner.step()


def test_owners_are_one_for_each_sequence() -> None:
    runner = Runner()
    tables = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="1 owners of 2 sequences"):
        AttentionBatch.step([1, 2], torch.tensor([0, 1]), tables, PAGE, ["a", "a"], runner.resident)
