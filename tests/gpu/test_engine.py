"""The engine contract on CUDA: over torch's kernels in float32, the same tests that the CPU passes, with KV on the
device, in host memory, and in both; then what only flash-attn's kernels have: graphs, whose tokens are those of eager
steps, and copies beside a running batch."""

import importlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.engine import factory
from baton.engine.core import EngineCore
from baton.model.attention import flash_backend
from baton.request import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.contract.conftest import make_torch
from tests.contract.engines import MIXED, Rig, advance, copy_kv, generate, move, prefill, start, state, whole_kv
from tests.engine_calls import found, insert, prefill_chunk

CONTRACT = ("test_engine", "test_engine_ahead", "test_engine_pages", "test_engine_prefix", "test_engine_spares")

for _module in CONTRACT:
    _tests = vars(importlib.import_module(f"tests.contract.{_module}"))
    # Fixtures and helpers come along, but not in the place of what has its name here already.
    globals().update({name: value for name, value in _tests.items() if name not in globals()})

flash = pytest.mark.skipif(not flash_backend.available(), reason="flash-attn is not installed")


@pytest.fixture(params=["device", "both", "host"])
def rig(request: pytest.FixtureRequest, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """The torch engine on CUDA with a step ahead, for each home of its KV; afterwards all that it made audit clean."""
    # Measuring takes longer than a test.
    monkeypatch.setattr(factory, "measure_rates", lambda *_: (1e15, 5e10))
    make = partial(make_torch, checkpoint, steps_ahead=1, device="cuda", home=request.param)
    made = Rig(request.param, make, vocab=256, exact=False)
    yield made
    made.close()


def made_for_flash(tmp_path: Path, **sizes: Any) -> EngineCore:
    """bfloat16, pages of 256, heads of 64, contexts of 1,024."""
    path = make_checkpoint("llama", tmp_path, head_dim=64)
    fitting = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "page_size": 256, "pages": 24, "max_model_len": 1024}
    engine = make_torch(path, 1, device="cuda", **{**fitting, **sizes})
    runner: Any = engine.executor
    assert runner.runner._graphs is not None
    return engine


@pytest.mark.parametrize("params", MIXED)
def test_a_sequence_moves_from_a_cpu_to_cuda_and_back(checkpoint: Path, params: SamplingParams) -> None:
    here, there = make_torch(checkpoint), make_torch(checkpoint, 1, device="cuda", page_size=32)
    wanted = state([7 * position % 256 for position in range(45)], params)
    expected = generate(here, wanted, 30)
    source, (handle, outputs) = here, start(here, "a", wanted)
    for target in (there, here):
        for _ in range(8):
            advance(source, [(handle, outputs)])
        tokens = len(wanted.prompt_ids) + len(outputs)
        home = target.reserve("a", tokens + 20)
        move(source, handle, target, home, tokens - 1)
        source.free(handle)
        insert(target, home, replace(wanted, output_ids=tuple(outputs)))
        source, handle = target, home
    while len(outputs) < 30:
        advance(source, [(handle, outputs)])
    assert outputs == expected
    source.free(handle)
    for engine in (here, there):
        engine.close()
        assert engine.audit() == {}


@flash
def test_graphs_equal_eager(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = made_for_flash(tmp_path)
    eager: Any = made_for_flash(tmp_path)
    # Eager steps of the graphs' shapes, or the kernels' choices would show in the last bits of bfloat16.
    graphs = engine.executor.runner._graphs
    monkeypatch.setattr(eager.executor.runner._graphs, "_capture", lambda rows, width: None)
    prompts = [[(i + position) % 256 for position in range(20 + 90 * i)] for i in range(len(MIXED))]
    wanted = [state(prompt, params) for prompt, params in zip(prompts, MIXED, strict=True)]
    outcomes: dict[str, list[list[int]]] = {}
    with caplog.at_level(logging.INFO):
        for name, each in (("graphs", engine), ("eager", eager)):
            running = [start(each, f"{i}", one, 30) for i, one in enumerate(wanted)]
            for turn in range(24):
                results = found(each.launch().result())
                for handle, outputs in running:
                    outputs += [info.token_id for own, infos in results if own is handle for info in infos]
                if turn == 9:
                    each.free(running[1][0])
            outcomes[name] = [outputs for _, outputs in running]
    if graphs.rows:
        assert "captured the decode graph of 8 rows" in caplog.text
        assert "captured the decode graph of 4 rows" in caplog.text
    assert outcomes["graphs"] == outcomes["eager"]


@flash
def test_copies_beside_a_running_batch_change_nothing(tmp_path: Path) -> None:
    engine = made_for_flash(tmp_path)
    prompt = list(range(200)) * 3
    donor = engine.reserve("donor", 600)
    prefill(engine, donor, state(prompt), 128)
    before = [bytes(part.data) for part in whole_kv(engine, donor, 600)]
    expected = generate(engine, state([5, 6, 7]), 40)
    handle, outputs = start(engine, "a/1", state([5, 6, 7]))

    with ThreadPoolExecutor(2) as threads:
        copies = [threads.submit(copy_kv, engine, donor, f"t{number}", 600) for number in range(6)]
        unread = engine.launch()
        while len(outputs) < 40:
            following = engine.launch()
            outputs += [info.token_id for own, infos in found(unread.result()) if own is handle for info in infos]
            unread = following
        unread.result()
        assert all(copy.result(60) == before for copy in copies)
    assert outputs[:40] == expected


@flash
def test_a_chunk_that_is_called_off_leaves_its_pages_to_others(tmp_path: Path) -> None:
    engine = made_for_flash(tmp_path)
    prompt = list(range(250)) * 4
    expected = generate(engine, state(prompt[:300]), 6)

    def call_off(layer: int) -> None:
        raise RuntimeError("called off")

    for _ in range(5):
        handle = engine.reserve("off", 1000)
        with pytest.raises(RuntimeError, match="called off"):
            prefill_chunk(engine, handle, prompt, 0, 1000, on_layer=call_off)
        engine.free(handle)
        assert generate(engine, state(prompt[:300]), 6) == expected


@flash
def test_log_probabilities_come_with_a_step_ahead(tmp_path: Path) -> None:
    engine = made_for_flash(tmp_path)
    wanted = state([1, 2, 3], replace(MIXED[0], logprobs=2))
    handle, _ = start(engine, "a", wanted)
    first, second = engine.launch(), engine.launch()
    for one in (first, second):
        ((own, (info,)),) = found(one.result())
        assert own is handle
        assert len(info.top) == 2
        assert info.logprob == info.top[0][1]
