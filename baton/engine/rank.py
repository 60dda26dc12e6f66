"""The process of a rank: `python -m baton.engine.rank CONNECTION HEARTBEATS PAGES COLLECTIVE RECEIVE SEND`.

The arguments are file descriptors, or -1 for exchanges that the rank does not have. The leader starts the process
(`baton.engine.ranks`), which ends with it. The rank loads its shard of the model, makes its pages when the leader has
sent the spec, and then computes the leader's passes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from baton.engine.executor import PassEnded
from baton.engine.process import prepare
from baton.engine.ranks import (
    HEARTBEAT_S,
    Exchange,
    ExchangeFiles,
    Heartbeats,
    RankCommand,
    RankFailure,
    RankStart,
    RunPass,
    StageRunner,
)
from baton.errors import BatonError, ModelError
from baton.process import cores
from baton.process.load_progress import LoadProgress
from baton.telemetry import logs

_log = logging.getLogger(__name__)


def main() -> None:
    """Run the rank until its leader is gone."""
    number, heartbeats, pages, *exchanges = (int(word) for word in sys.argv[1:])
    connection: Connection[Any, Any] = Connection(number)
    start: RankStart = connection.recv()
    level, worker, log_format = start.log
    logs.configure(level, f"rank {start.rank}", worker, log_format=log_format)
    config = start.config
    os.sched_setaffinity(0, cores.share(start.rank, config.ranks, config.threads, start.cores))
    prepare(threads=config.threads)
    serve(connection, start, heartbeats, pages, ExchangeFiles(*exchanges))
    # As services do: unloading torch would take seconds on a busy machine.
    os._exit(0)


def serve(
    connection: Connection[Any, Any], start: RankStart, heartbeats: int, pages: int, exchanges: ExchangeFiles
) -> None:
    """Run a rank over memory that it shares with others, until the leader closes the connection or is gone."""
    progress = LoadProgress()
    works = [lambda: progress.moves]
    _start_heartbeats(Heartbeats(heartbeats, start.config.ranks), start.rank, lambda: works[-1]())
    try:
        from baton.engine.factory import load, make_kv_cache, make_runner, place_of
        from baton.model.zeros import SharedMemory

        place = place_of(start.config, start.rank, exchanges, start.buffer_floats)
        model = load(start.config, progress, place)
        connection.send(None)
        spec = connection.recv()
        if model.fingerprint != spec.fingerprint:
            raise ModelError(f"{start.config.model}: the checkpoint has changed while the ranks loaded it")
        runner = make_runner(start.config, model, make_kv_cache(start.config, model, spec, SharedMemory(pages)), spec)
        works.append(runner.work_counter)
        connection.send(None)
    except (EOFError, ConnectionError):
        # The leader is gone.
        return
    except Exception as error:
        if not isinstance(error, BatonError):
            _log.exception("rank %d can't start", start.rank)
        connection.send(RankFailure(type(error).__name__, str(error)))
        with contextlib.suppress(EOFError):
            # The leader reads the reason before it notices the end.
            connection.recv()
        return
    last = place.pp_rank == place.pp_size - 1
    sends = last and place.pp_size > 1 and place.tp_rank == 0
    RankServer(connection, runner, place.exchanges, is_last_stage=last, sends_results=sends).run()


class _Left(Exception):
    """Raised to leave the pass that this rank computes, and the passes that it interrupted."""


class _Closed(Exception):
    """The leader has closed the connection, or is gone."""


class RankServer:
    """The loop of a rank: it computes the passes of the leader, and follows its commands."""

    def __init__(
        self,
        connection: Connection[Any, Any],
        runner: StageRunner,
        exchanges: Sequence[Exchange],
        *,
        is_last_stage: bool,
        sends_results: bool,
    ) -> None:
        """`exchanges` are those of this rank. One rank of the last stage of a pipeline sends the results."""
        self._connection = connection
        self._runner = runner
        self._exchanges = exchanges
        self._is_last_stage = is_last_stage
        self._sends_results = sends_results

    def run(self) -> None:
        """Compute passes until the leader has closed the connection."""
        with contextlib.suppress(_Closed):
            while True:
                with contextlib.suppress(_Left):
                    self._handle(self._receive())

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise _Closed from None

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise _Closed from None

    def _handle(self, message: object) -> None:
        """Compute a pass, or leave a failed one. Commands for a pass that this rank has left are ignored."""
        if isinstance(message, RunPass):
            self._compute(message)
        elif message is RankCommand.RECOVER:
            self._send(RankCommand.RECOVER)
            raise _Left

    def _compute(self, given: RunPass) -> None:
        try:
            if not self._is_last_stage:
                self._runner.append(given.tokens)
            forwarded = self._runner.forward(given.plan, self._on_layer if given.after_each_layer else None)
            result = self._runner.sample(given.plan, forwarded)() if self._is_last_stage else None
            if self._sends_results:
                self._send(result)
        except PassEnded:
            pass
        except (_Left, _Closed):
            raise
        except Exception as error:
            if not any(exchange.aborted for exchange in self._exchanges):
                _log.exception("a pass failed")
                self._send(RankFailure(type(error).__name__, f"{type(error).__name__}: {error}"))
            for exchange in self._exchanges:
                exchange.abort()
            raise _Left from None

    def _on_layer(self, _layer: int) -> None:
        while (message := self._receive()) is not RankCommand.CONTINUE:
            if message is RankCommand.END_PASS:
                raise PassEnded
            self._handle(message)


def _start_heartbeats(heartbeats: Heartbeats, rank: int, work: Callable[[], int]) -> None:
    """Record a heartbeat of this rank with its work each HEARTBEAT_S seconds, on a thread of its own."""

    def run() -> None:
        while True:
            heartbeats.record(rank, work())
            time.sleep(HEARTBEAT_S)

    threading.Thread(target=run, name="heartbeats", daemon=True).start()


if __name__ == "__main__":
    main()
