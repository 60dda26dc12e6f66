"""Decode graphs: what they replay follows tensors alone, and what can't be captured runs all the same."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.engine import model_runner
from baton.engine.contract import EngineSpec
from baton.engine.core import EngineCore
from baton.engine.cuda_graphs import padded
from baton.engine.executor import InProcessExecutor
from baton.engine.load import LoadedModel
from baton.engine.model_runner import ModelRunner
from baton.model import decoder
from baton.model.attention.flash_backend import FlashKernels
from tests.contract.engines import MIXED, generate, start, state
from tests.engine_calls import found
from tests.unit.engine.cuda_standin import FLASH, Cuda, cuda

__all__ = ["cuda"]

PROMPTS = [[(7 * i + position) % 256 for position in range(5 + 11 * i)] for i in range(len(MIXED))]
WANTED = [state(prompt, params) for prompt, params in zip(PROMPTS, MIXED, strict=True)]
Make = Callable[[], EngineCore]


@pytest.fixture
def make(model: LoadedModel, spec: EngineSpec, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Engines with graphs and a step ahead."""
    for module in (model_runner, decoder):
        monkeypatch.setattr(module, "select", lambda *_: FLASH)
    spec = replace(spec, steps_ahead=1)
    return lambda: EngineCore(spec, InProcessExecutor(ModelRunner(model, model.new_kv_cache(61, 16), spec)))


def batch(engine: EngineCore) -> list[list[int]]:
    """Outputs of sequences of which one leaves and the last one joins while steps are in flight."""
    running = [start(engine, f"{i}", one) for i, one in enumerate(WANTED[:-1])]
    unread: list[Any] = []
    for turn in range(26):
        if turn == 4:
            running.append(start(engine, "last", WANTED[-1]))
        unread.append(engine.launch())
        if turn == 8:
            engine.free(running[1][0])
        if len(unread) > 1:
            for own, infos in found(unread.pop(0).result()):
                outputs = next(outputs for handle, outputs in running if handle is own)
                outputs += [info.token_id for info in infos]
    unread.pop().result()
    for handle, _ in running:
        engine.free(handle)
    engine.launch().result()
    assert engine.audit() == {}
    return [outputs for _, outputs in running]


def expected(engine: EngineCore, found: list[list[int]]) -> list[list[int]]:
    engine.executor.runner._graphs = None  # type: ignore[attr-defined]
    return [generate(engine, one, len(outputs)) for one, outputs in zip(WANTED, found, strict=True)]


def test_tokens_are_those_of_eager_steps(
    make: Make, cuda: Cuda, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, eager = make(), make()
    # It is the whole process's: from here on, copies of other threads would fail.
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: pytest.fail(f"{mode} while others copy"))
    with caplog.at_level(logging.INFO, "baton.engine.cuda_graphs"):
        found = batch(engine)
    assert found == expected(eager, found)
    # Four rows, then eight, then four again; contexts grow from 3 pages to 5.
    shapes = {tuple(record.args[:2]) for record in caplog.records}  # type: ignore[index]
    assert shapes == {(4, 4), (8, 4), (4, 8)}
    assert cuda.captures == len(shapes)
    assert (cuda.sync_mode, cuda.current) == ("default", cuda.main)


def test_a_shape_whose_capture_fails_is_left_alone(make: Make, cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    cuda.capture_error = torch.OutOfMemoryError("no memory is left")
    found = batch(engine)
    assert found == expected(make(), found)
    said = "steps of 8 rows and 4 pages run without a CUDA graph: no memory is left"
    assert caplog.messages.count(said) == 1
    assert cuda.captures == len(caplog.messages) == 3
    assert (cuda.sync_mode, cuda.current) == ("default", cuda.main)


def test_a_step_that_makes_the_host_wait_is_never_captured(
    make: Make, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def waiting(*args: Any, **kwargs: Any) -> Any:
        if cuda.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return FLASH._kernels.with_kvcache(*args, **kwargs)

    slow = type(FLASH)(FlashKernels(waiting, FLASH._kernels.varlen))
    for module in (model_runner, decoder):
        monkeypatch.setattr(module, "select", lambda *_: slow)
    engine = make()
    found = batch(engine)
    assert cuda.captures == 0
    assert len(caplog.messages) == 1
    assert "decode runs without CUDA graphs" in caplog.messages[0]
    assert found == expected(make(), found)
    assert (cuda.sync_mode, cuda.current) == ("default", cuda.main)


def test_graphs_hold_the_next_power_of_two() -> None:
    assert [padded(count) for count in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
