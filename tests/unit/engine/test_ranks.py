"""Several ranks of one model: failures of a pass, of a rank, and of its start. Ranks are threads."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config.worker import DecodeConfig
from baton.engine import factory, ranks
from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.model_runner import ModelRunner
from baton.engine.ranks import ExchangeFiles, Heartbeats, Ranks
from baton.errors import ConfigError, EngineError, ModelError
from baton.process import cores
from baton.process.load_progress import LoadProgress
from baton.telemetry.metrics import RANK_WAIT_SECONDS
from baton.worker import start
from tests.checkpoints import make_checkpoint
from tests.contract.engines import MIXED, generate, prefill, state
from tests.engine_calls import prefill_chunk
from tests.metrics import count
from tests.rank_threads import RankThread

PROMPT = list(range(3, 60))
TP, PP = {"tensor_parallel": 2}, {"pipeline_parallel": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


@contextlib.contextmanager
def engine_of(checkpoint: Path, start_rank: Any = RankThread, **degrees: int) -> Iterator[EngineCore]:
    settings = {"dtype": "float32", "kernels": "torch", "threads": 1, "slots": 4, "max_model_len": 256} | degrees
    engine = factory.build(EngineConfig(str(checkpoint), kv_memory=1 << 22, **settings), start_rank=start_rank)  # type: ignore[arg-type]
    try:
        yield engine
        engine.audit()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    with engine_of(checkpoint) as engine:
        return [generate(engine, state(PROMPT, params), 12) for params in MIXED]


def fails_once(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    where: Callable[[str], bool],
    error: type[Exception] = RuntimeError,
) -> None:
    """The next call of a ModelRunner's method on a thread of such a name raises."""
    call, left = getattr(ModelRunner, method), [1]

    def failing(self: ModelRunner, *of: Any) -> Any:
        if left and where(threading.current_thread().name):
            left.clear()
            raise error("out of luck")
        return call(self, *of)

    monkeypatch.setattr(ModelRunner, method, failing)


@pytest.mark.parametrize(
    ("degrees", "rank"),
    [(TP, "MainThread"), (TP, "rank 1"), (PP, "MainThread"), (PP, "rank 1"), (PP, "rank 2")],
    ids=str,
)
@pytest.mark.parametrize("method", ["forward", "_update"])
def test_a_pass_fails_as_a_whole_and_the_next_ones_are_right(
    degrees: dict[str, int],
    rank: str,
    method: str,
    checkpoint: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_of(checkpoint, **degrees) as engine:
        handle = engine.reserve("r/1", 80)
        prefill(engine, handle, state(PROMPT))
        fails_once(monkeypatch, method, lambda name: name == rank)
        with pytest.raises(EngineError, match="out of luck"):
            prefill(engine, handle, state(PROMPT))
        engine.free(handle)
        assert [generate(engine, state(PROMPT, params), 12) for params in MIXED] == expected


def test_a_failed_pass_between_layers_ends_the_pass_around_it(
    checkpoint: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(checkpoint, **TP) as engine:
        outer, inner = engine.reserve("outer", 80), engine.reserve("inner", 80)
        failed = []

        def on_layer(layer: int) -> None:
            if layer == 1:
                fails_once(monkeypatch, "forward", lambda name: name == "rank 1")
                with pytest.raises(EngineError, match="out of luck"):
                    prefill(engine, inner, state(PROMPT))
                failed.append(layer)

        with pytest.raises(EngineError, match="a pass between its layers failed"):
            prefill_chunk(engine, outer, PROMPT, 0, 40, on_layer=on_layer)
        assert failed == [1]
        engine.free(outer)
        engine.free(inner)
        assert generate(engine, state(PROMPT, MIXED[1]), 12) == expected[1]


def test_an_error_of_the_system_in_a_pass_does_not_end_the_rank(
    checkpoint: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(checkpoint, **TP) as engine:
        fails_once(monkeypatch, "forward", lambda name: name == "rank 1", OSError)
        handle = engine.reserve("r/1", 80)
        with pytest.raises(EngineError, match="rank 1: OSError: out of luck"):
            prefill(engine, handle, state(PROMPT))
        engine.free(handle)
        assert generate(engine, state(PROMPT, MIXED[1]), 12) == expected[1]


@pytest.mark.parametrize("degrees", [TP, PP], ids=str)
def test_the_death_of_a_rank_is_reported_and_ends_every_pass(degrees: dict[str, int], checkpoint: Path) -> None:
    with engine_of(checkpoint, **degrees) as engine:
        generate(engine, state(PROMPT), 3)
        reported, seen = list[EngineError](), threading.Event()
        engine.watch_failure(lambda error: (reported.append(error), seen.set()))
        os.kill(ranks_of(engine).pids[0], 9)
        assert seen.wait(60)
        assert [str(error).split(")")[1] for error in reported] == [" was killed by SIGKILL"]
        with pytest.raises(EngineError, match=r"rank 1 .* was killed by SIGKILL"):
            prefill(engine, engine.reserve("r", 80), state(PROMPT))
        late = list[EngineError]()
        engine.watch_failure(late.append)
        assert late == reported


def ranks_of(engine: EngineCore) -> Ranks:
    found: Ranks = engine.executor._ranks  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("degrees", [TP, PP], ids=str)
def test_waiting_for_ranks_is_counted(
    degrees: dict[str, int], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ModelRunner.forward

    def slow(self: ModelRunner, *of: Any) -> Any:
        if threading.current_thread().name == "rank 1":
            time.sleep(0.5)
        return forward(self, *of)

    monkeypatch.setattr(ModelRunner, "forward", slow)
    before = count(RANK_WAIT_SECONDS)
    with engine_of(checkpoint, **degrees) as engine:
        prefill(engine, engine.reserve("r", 80), state(PROMPT))
    assert count(RANK_WAIT_SECONDS) > before


class Still:
    """A rank that has one heartbeat."""

    def __init__(self, rank: int, files: Sequence[int]) -> None:
        self._process = subprocess.Popen(["sleep", "infinity"], pass_fds=files[:1])
        self.pid = self._process.pid
        self.kill, self.wait = self._process.kill, self._process.wait
        Heartbeats(files[1], 2).record(rank, 0)


def test_a_rank_that_stands_still_is_reported_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LOOK_S", 0.01)
    none = ExchangeFiles(-1, -1, -1)
    started: list[Still] = []

    def launch(rank: int, files: Sequence[int]) -> Still:
        started.append(Still(rank, files))
        return started[-1]

    made = Ranks(EngineConfig("m", **TP), 64, [none, none], launch)
    try:
        reported, seen = list[EngineError](), threading.Event()
        made.watch_failure(lambda error: (reported.append(error), seen.set()))
        assert seen.wait(60)
        assert str(reported[0]).endswith("has stood still for 0.1 s")
        assert started[0].wait(60) == -signal.SIGKILL
    finally:
        made.close()


def test_a_send_to_a_frozen_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LOOK_S", 0.01)
    none = ExchangeFiles(-1, -1, -1)
    made = Ranks(EngineConfig("m", **TP), 64, [none, none], Still)
    try:
        # More than the socket holds.
        with pytest.raises(EngineError, match=r"has stood still for 0.1 s"):
            made.send(bytes(1 << 22))
    finally:
        made.close()


def test_a_rank_that_beats_is_left_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LOOK_S", 0.6)
    monkeypatch.setattr(ranks, "_STILL_LOOKS", 60)
    with engine_of(checkpoint, **TP) as engine:
        own, waiting = ranks_of(engine), threading.Event()
        before = own.heartbeats.count(1)
        while own.heartbeats.count(1) < before + 2:
            waiting.wait(0.1)
        assert own.error is None


@pytest.mark.parametrize(("cores", "expected"), [(16, 4), (3, 1)])
def test_cores_are_divided_by_the_ranks_once(
    cores: int, expected: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = list[int]()
    monkeypatch.setattr(factory.cores, "usable", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    with engine_of(checkpoint, threads=0, tensor_parallel=2, pipeline_parallel=2):
        assert set_to == [expected] * 4


@pytest.mark.parametrize("missing", ["memfd_create", "pidfd_open"])
def test_a_system_without_what_ranks_need_is_named(
    missing: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, missing, refuse)
    with pytest.raises(ConfigError, match=r"^2 ranks can't be started: .*Function not implemented"):
        factory.build(EngineConfig(str(checkpoint), threads=1, **TP), start_rank=Still)


def test_a_rank_that_can_not_start_says_why(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = factory.load

    def refusing(*of: Any) -> Any:
        if threading.current_thread().name.startswith("rank"):
            raise ConfigError("packed_weights: no space")
        return load(*of)

    monkeypatch.setattr(factory, "load", refusing)
    with pytest.raises(ConfigError, match=r"^rank 1: packed_weights: no space$"), engine_of(checkpoint, **TP):
        pass


def test_the_death_of_a_rank_ends_the_load(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, started = factory.load, list[RankThread]()

    def launch(rank: int, files: Sequence[int]) -> RankThread:
        started.append(RankThread(rank, files))
        return started[-1]

    def endless(config: EngineConfig, progress: LoadProgress, *of: Any) -> Any:
        if threading.current_thread().name.startswith("rank"):
            return load(config, progress, *of)
        started[0].kill()
        for _ in range(10_000):
            progress.touch()
            time.sleep(0.001)
        return None

    monkeypatch.setattr(factory, "load", endless)
    with pytest.raises(EngineError, match=r"rank 1 .* was killed by SIGKILL"), engine_of(checkpoint, launch, **TP):
        pass


def test_a_checkpoint_that_changes_during_the_load_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, other = factory.load, make_checkpoint("qwen2", tmp_path, seed=1)

    def load_of(config: EngineConfig, *of: Any) -> Any:
        of_rank = threading.current_thread().name.startswith("rank")
        return load(replace(config, model=str(other)) if of_rank else config, *of)

    monkeypatch.setattr(factory, "load", load_of)
    with (
        pytest.raises(ModelError, match=r"^rank 1: .*: the checkpoint has changed while the ranks loaded it$"),
        engine_of(checkpoint, **TP),
    ):
        pass


def test_ranks_use_all_cores_of_the_worker(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = set(range(16))
    monkeypatch.setattr(cores, "quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(own))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, given: (own.clear(), own.update(given)))
    built = list[EngineConfig]()
    monkeypatch.setattr(factory, "build", lambda config, **_: built.append(config))
    start._build(DecodeConfig(model=str(checkpoint), tensor_parallel=2), LoadProgress())
    assert (built[0].threads, len(own)) == (8, 8)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (
            {"tensor_parallel": 3},
            "^tensor_parallel: num_attention_heads 4 is not divisible by 3 ranks; 1, 2, 4 would do$",
        ),
        ({"pipeline_parallel": 4}, "^pipeline_parallel: 4 is above num_hidden_layers, 3$"),
        (
            {"pipeline_parallel": 2, "host_memory": 4096},
            "^pipeline_parallel: 2 stages have no KV in host memory, got kv_home auto and host_memory 4096$",
        ),
        ({"tensor_parallel": 0}, "^tensor_parallel: must be 1 or more, got 0$"),
    ],
    ids=str,
)
def test_degrees_that_do_not_fit_are_named(degrees: dict[str, int], words: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=words), engine_of(checkpoint, **degrees):
        pass
