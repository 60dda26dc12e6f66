"""Several ranks of one model on this host: the executor of the leader, which is rank 0, and its connections.

    EngineCore ── plan ──▶ RanksExecutor ──▶ the leader's ModelRunner
                                │ pass, commands                      ranks meet in collectives and channels
                                └──────────▶ RankServer ──▶ ModelRunner of rank 1 …

Each rank has a shard of the model and of the KV, and computes the same passes in the same order. Only the leader
decides. It sends each plan in one message, before it computes the pass itself.

The ranks of a stage share each layer (tensor parallel). If a pass reports its layers, the other ranks wait after each
layer for a message of the leader: go on, end the pass, or compute another pass first. So ranks never disagree. All
ranks of a stage sample the same tokens from the same logits.

The stages of a pipeline have different layers (`baton.engine.pipeline`). The last one samples, and sends the result to
the leader, whose next message has the tokens for the other stages. Layers are reported when the whole pass has ended,
so it can't be stopped before.

Pages of all shards are memory that the leader maps too. So it reads and writes them alone, between and beside passes.

    a rank raises ──▶ collectives are aborted ──▶ all ranks leave the pass ──▶ the leader's `launch` raises; ranks go on
    a rank dies or stands still ──▶ collectives are aborted ──▶ `watch_failure`: the worker ends

`baton.engine.rank` is the process of a rank, with the other end of these messages.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import mmap
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol, cast

from baton.engine.config import EngineConfig
from baton.engine.contract import EngineSpec, OnLayer
from baton.engine.executor import KvMemory, PassEnded, Runner, as_engine_errors
from baton.engine.plan import ForwardPlan, PlanResult
from baton.errors import ConfigError, EngineError, JoinFailed, ModelError
from baton.native.mapping import shared_file
from baton.process.load_progress import LoadProgress
from baton.process.supervisor import bind_to_parent, describe_exit
from baton.telemetry import logs
from baton.telemetry.metrics import RANK_WAIT_SECONDS

HEARTBEAT_S = 0.5
"""Seconds between two heartbeats of a rank."""

_LOOK_S, _STILL_LOOKS = 1.0, 10
"""Seconds between two looks at the heartbeats, and number of looks without a new one after which a rank is frozen."""

_RECOVER_S = 10.0
"""Longest time in seconds until all ranks have left a failed pass."""

_END_S = 2.0
"""Seconds that ranks get to end, before they are killed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankStart:
    """The first message to a rank: its number, and the settings of its engine and its log.

    Ranks are numbered stage by stage. `buffer_floats` is the size of the buffers of collectives and channels. `cores`
    are those of the worker.
    """

    rank: int
    buffer_floats: int
    config: EngineConfig
    cores: tuple[int, ...]
    log: tuple[str, str, str]
    """Settings of the leader's log (`baton.telemetry.logs.settings`)."""


@dataclass(frozen=True, slots=True)
class RunPass:
    """A plan to compute. With `after_each_layer`, the rank waits for a command of the leader after each layer.

    `tokens` has the token that the last stage has sampled for each slot, for ranks of other stages.
    """

    plan: ForwardPlan
    after_each_layer: bool = False
    tokens: Mapping[int, int] = field(default_factory=dict)


class RankCommand(enum.Enum):
    """A command of the leader: after a layer, to go on or end the pass; after a failed pass, to leave it and answer."""

    CONTINUE = enum.auto()
    END_PASS = enum.auto()
    RECOVER = enum.auto()


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The error of a rank; `kind` is the name of its class."""

    kind: str
    text: str


class Exchange(Protocol):
    """Collectives or a channel, whose waits can be ended from outside (`baton.native`)."""

    @property
    def aborted(self) -> bool: ...
    @property
    def waited_s(self) -> float: ...
    def abort(self) -> None: ...
    def reset(self) -> None: ...


class StageRunner(Runner, Protocol):
    """A runner that may be one of a stage before the last."""

    def append(self, tokens: Mapping[int, int]) -> None:
        """Append the token that the last stage has sampled for each slot."""


class Heartbeats:
    """Two numbers of each rank in shared memory: heartbeats so far, and its work.

    The work is the progress of the load until the model is there, then `Runner.work_counter`: only a change of it has a
    meaning.
    """

    def __init__(self, file: int, size: int) -> None:
        """`file` is a descriptor of memory for `size` ranks, which may be closed afterwards."""
        self._numbers = memoryview(mmap.mmap(file, self.bytes_of(size))).cast("q")

    @staticmethod
    def bytes_of(size: int) -> int:
        """Bytes of the memory for `size` ranks."""
        return 16 * size

    def record(self, rank: int, work: int) -> None:
        """Record a heartbeat of a rank."""
        self._numbers[2 * rank] += 1
        self._numbers[2 * rank + 1] = work

    def count(self, rank: int) -> int:
        """Number of heartbeats of a rank."""
        return self._numbers[2 * rank]

    def work(self) -> int:
        """The work of all ranks together."""
        return sum(self._numbers[1::2])


class RankProcess(Protocol):
    """A process of a rank, as subprocess.Popen has it."""

    pid: int

    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


StartRank = Callable[[int, Sequence[int]], RankProcess]
"""Starts the process of a rank, which inherits descriptors: connection, heartbeats, KV pages, and then those of its
exchanges (`ExchangeFiles`)."""


def start_rank_process(rank: int, files: Sequence[int]) -> RankProcess:
    """Start `python -m baton.engine.rank`.

    It ends with the calling thread, even if this process is killed (`bind_to_parent`).
    """
    command = [sys.executable, "-m", "baton.engine.rank", *map(str, files)]
    _log.debug("starting rank %d", rank)
    quiet, given = subprocess.DEVNULL, [file for file in files if file >= 0]
    return subprocess.Popen(bind_to_parent(command), pass_fds=given, stdin=quiet, stdout=quiet, start_new_session=True)


class ExchangeFiles(NamedTuple):
    """The descriptors of the memory of a rank's exchanges; -1 for one that it does not have.

    `collective` is for the ranks of its stage, `receive` and `send` for the stages before and after it.
    """

    collective: int
    receive: int
    send: int


class Ranks:
    """The leader's connections to the processes of the other ranks."""

    def __init__(
        self, config: EngineConfig, buffer_floats: int, files: Sequence[ExchangeFiles], start_rank: StartRank
    ) -> None:
        """Start the processes, which begin to load their shards.

        `files` has the exchanges of each rank, the leader's too; `close` closes them. `buffer_floats` is the size of
        their buffers.
        """
        self.size = len(files)
        self.error: EngineError | None = None
        """The reason why no pass can be computed any more."""
        self._failed: Callable[[EngineError], object] = lambda _: None
        self._exchanges: Sequence[Exchange] = ()
        self._result_wait_s = 0.0
        self._lock = threading.Lock()
        self._closing, self._closed = os.pipe()
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[RankProcess] = []
        self._ends: list[int] = []
        """Descriptors of the processes, which are readable when they have ended (pidfd_open(2))."""
        self.kv_files: list[int] = []
        """The memory of the pages of each rank but the leader."""
        self._files = {file for each in files for file in each if file >= 0}
        # Of the main thread: this one may have the leader's share already.
        own = tuple(os.sched_getaffinity(os.getpid()))
        heartbeats = shared_file("baton-heartbeats", Heartbeats.bytes_of(self.size))
        self.heartbeats = Heartbeats(heartbeats, self.size)
        try:
            for rank in range(1, self.size):
                start = RankStart(rank, buffer_floats, config, own, logs.settings())
                self._start(start, heartbeats, files[rank], start_rank)
        except BaseException:
            self.close()
            os.close(self._closing)
            raise
        finally:
            os.close(heartbeats)
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    def _start(self, start: RankStart, heartbeats: int, exchanges: ExchangeFiles, start_rank: StartRank) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(Connection(ours.detach()))
        self.kv_files.append(shared_file(f"baton-kv-{start.rank}", 0))
        with theirs:
            files = (theirs.fileno(), heartbeats, self.kv_files[-1], *exchanges)
            self._processes.append(start_rank(start.rank, files))
        self._ends.append(os.pidfd_open(self._processes[-1].pid))
        # A process that has ended already is noticed later.
        with contextlib.suppress(OSError):
            self._connections[-1].send(start)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in their order."""
        return [process.pid for process in self._processes]

    def attach(self, exchanges: Sequence[Exchange]) -> None:
        """Set the leader's ends of the exchanges of all ranks, which are aborted when a rank fails."""
        self._exchanges = exchanges
        self.check()

    def wait_loaded(self, progress: LoadProgress) -> None:
        """Wait until all ranks have loaded their shards. Raises the error of the first rank that could not."""
        seen = -1
        for rank, connection in enumerate(self._connections, 1):
            progress.begin(f"waiting for rank {rank} to load its shard")
            while not connection.poll(HEARTBEAT_S):
                self.check()
                if (work := self.heartbeats.work()) != seen:
                    seen = work
                    progress.touch()
            self._expect(rank, None)

    def share_pages(self, spec: EngineSpec) -> None:
        """Tell all ranks the spec, with which they make their pages, and wait until they have."""
        self.send(spec)
        for rank in range(1, self.size):
            self._expect(rank, None)

    def send(self, message: object) -> None:
        """Send a message to all ranks. Raises EngineError if one has died."""
        self.check()
        data = pickle.dumps(message)
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(data)
            except OSError:
                raise self._record_end(rank) from None

    def receive(self) -> PlanResult:
        """Wait for the result of a pass, which a rank of the last stage sends. Raises EngineError if a rank fails."""
        while True:
            began = time.monotonic()
            ready = wait(self._connections, HEARTBEAT_S)
            self._result_wait_s += time.monotonic() - began
            for each in ready:
                rank = self._connections.index(cast("Connection[Any, Any]", each)) + 1
                message = self._receive(rank)
                if isinstance(message, PlanResult):
                    return message
                raise EngineError(f"rank {rank}: {message.text}")
            self.check()

    @property
    def waited_s(self) -> float:
        """Seconds that the leader has waited for other ranks in passes."""
        return self._result_wait_s + sum(exchange.waited_s for exchange in self._exchanges)

    def recover(self) -> str:
        """Make all ranks leave the failed pass; returns the error of a rank, or "". Raises EngineError if one can't."""
        self._abort()
        self.send(RankCommand.RECOVER)
        failures = [self._expect(rank, RankCommand.RECOVER) for rank in range(1, self.size)]
        for exchange in self._exchanges:
            exchange.reset()
        return "; ".join(filter(None, failures))

    def watch_failure(self, failed: Callable[[EngineError], object]) -> None:
        """Call `failed`, from any thread, when no pass can be computed any more."""
        with self._lock:
            self._failed = failed
        if self.error is not None:
            failed(self.error)

    def close(self) -> None:
        """End all ranks. Idempotent."""
        if self._closed < 0:
            return
        os.close(self._closed)
        self._closed = -1
        self._abort()
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
                continue
            process.kill()
            # The kernel may not end it soon, for instance during a read from a file server that does not answer.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        for file in (*self._files, *self.kv_files, *self._ends):
            os.close(file)

    def _abort(self) -> None:
        for exchange in self._exchanges:
            exchange.abort()

    def _receive(self, rank: int) -> Any:
        try:
            return self._connections[rank - 1].recv()
        except (EOFError, OSError):
            raise self._record_end(rank) from None

    def _expect(self, rank: int, wanted: RankCommand | None) -> str:
        """Wait for the answer `wanted` of a rank; returns its error before it. Raises the error if None is wanted."""
        connection, found = self._connections[rank - 1], ""
        deadline = time.monotonic() + _RECOVER_S
        while True:
            if not connection.poll(HEARTBEAT_S):
                self.check()
                if wanted is not None and time.monotonic() > deadline:
                    raise self._fail(f"rank {rank} does not leave a failed pass")
                continue
            message = self._receive(rank)
            if message is wanted:
                return found
            if isinstance(message, RankFailure):
                if wanted is None:
                    kinds = {"ConfigError": ConfigError, "ModelError": ModelError}
                    raise kinds.get(message.kind, EngineError)(f"rank {rank}: {message.text}")
                found = found or f"rank {rank}: {message.text}"

    def check(self) -> None:
        """Raise EngineError if no pass can be computed any more."""
        if self.error is not None:
            raise EngineError(str(self.error))

    def _record_end(self, rank: int) -> EngineError:
        """Record that a rank has closed its connection; usually its process has ended."""
        process = self._processes[rank - 1]
        try:
            end = describe_exit(process.wait(_END_S))
        except subprocess.TimeoutExpired:
            end = "does not answer"
        return self._fail(f"rank {rank} (process {process.pid}) {end}")

    def _fail(self, reason: str) -> EngineError:
        """Record that no pass can be computed any more; only the first reason counts."""
        with self._lock:
            first, self.error = self.error is None, self.error or EngineError(reason)
            failed = self._failed
        if first:
            _log.error("%s: the worker ends", reason)
            self._abort()
            # A thread may be inside a send to a rank that is frozen, or inside the receipt of its message.
            for process in self._processes:
                process.kill()
            failed(self.error)
        return self.error

    def _watch(self) -> None:
        """End the worker when the process of a rank has ended, or has had no heartbeat for _STILL_LOOKS looks."""
        poll = select.poll()
        for file in (self._closing, *self._ends):
            poll.register(file, select.POLLIN)
        still, seen = [0] * self.size, [0] * self.size
        try:
            while self.error is None:
                ready = [file for file, _ in poll.poll(1000 * _LOOK_S)]
                if self._closing in ready:
                    return
                for rank, (process, end) in enumerate(zip(self._processes, self._ends, strict=True), 1):
                    if end in ready:
                        self._fail(f"rank {rank} (process {process.pid}) {describe_exit(process.wait())}")
                    elif not ready:
                        count = self.heartbeats.count(rank)
                        # Until the first one Python starts, which takes long on a busy machine.
                        still[rank] = 0 if count != seen[rank] or not count else still[rank] + 1
                        seen[rank] = count
                        if still[rank] >= _STILL_LOOKS:
                            seconds = _LOOK_S * _STILL_LOOKS
                            self._fail(f"rank {rank} (process {process.pid}) has stood still for {seconds:g} s")
        finally:
            os.close(self._closing)


class RanksExecutor:
    """Executor of several ranks: the leader's runner, on the engine thread, and the others through `Ranks`."""

    def __init__(self, runner: StageRunner, memory: KvMemory, ranks: Ranks, stages: Sequence[range]) -> None:
        """`memory` is the pages of all shards. `stages` has the layers of each stage."""
        self.runner = runner
        self._memory = memory
        self._ranks = ranks
        self._stages = stages
        self._sampled: dict[int, int] = {}
        """The token of each slot that the last stage has sampled, for the next message to the other stages."""
        self._recoveries = 0
        self._waited_s = 0.0

    @property
    def memory(self) -> KvMemory:
        return self._memory

    def work_counter(self) -> int:
        return self.runner.work_counter() + self._ranks.heartbeats.work()

    def launch(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> Callable[[], PlanResult]:
        if len(self._stages) > 1:
            found = self._run_stages(plan)
            if on_layer is not None:
                for layer in range(self._stages[-1].stop):
                    on_layer(layer)
            return lambda: found
        with self._recovered_on_error():
            self._ranks.send(RunPass(plan, on_layer is not None))
            result = self.runner.sample(plan, self.runner.forward(plan, on_layer and self._relayed(on_layer)))

        def read() -> PlanResult:
            with as_engine_errors():
                return result()

        return read

    def _run_stages(self, plan: ForwardPlan) -> PlanResult:
        """Compute a pass in all stages, and wait for its result."""
        with self._recovered_on_error():
            tokens, self._sampled = self._sampled, {}
            self._ranks.send(RunPass(plan, tokens=tokens))
            self.runner.append(tokens)
            self.runner.forward(plan, None)
            result = self._ranks.receive()
        for row, found in zip(plan.rows, result.rows, strict=True):
            if isinstance(row.source, int) and found.tokens:
                self._sampled[row.source] = found.tokens[-1].token_id
        return result

    def watch_failure(self, failed: Callable[[EngineError], object]) -> None:
        self._ranks.watch_failure(failed)

    def close(self) -> None:
        self._ranks.close()

    def _relayed(self, on_layer: OnLayer) -> OnLayer:
        """Wrap `on_layer`: afterwards the ranks are told to go on, or to end the pass."""

        def relayed(layer: int) -> None:
            before = self._recoveries
            try:
                on_layer(layer)
            except PassEnded:
                self._ranks.send(RankCommand.END_PASS)
                raise
            if self._recoveries != before:
                raise EngineError("undone, because a pass between its layers failed")
            self._ranks.send(RankCommand.CONTINUE)

        return relayed

    @contextlib.contextmanager
    def _recovered_on_error(self) -> Iterator[None]:
        try:
            with as_engine_errors():
                yield
        except PassEnded:
            raise
        except BaseException as error:
            self._recoveries += 1
            self._sampled = {}
            text = self._ranks.recover()
            if text and not isinstance(error, JoinFailed):
                raise EngineError(text) from error
            raise
        finally:
            waited_s = self._ranks.waited_s
            RANK_WAIT_SECONDS.inc(waited_s - self._waited_s)
            self._waited_s = waited_s
