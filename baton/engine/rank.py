"""The process of a rank: `python -m baton.engine.rank CONNECTION BEATS PAGES COLLECTIVE RECEIVE SEND`.

The arguments are file descriptors, or -1 for links that the rank does not have.
The leader starts it (`baton.engine.ranks`), and it ends with the leader. It loads its shard of the model, makes its
pages when the leader has sent the spec, and then computes the leader's passes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from baton.engine.process import prepare
from baton.engine.ranks import Beats, LinkFiles, RankFailure, RankServer, RankStart, beat
from baton.errors import BatonError, ModelError
from baton.process import cores
from baton.process.load_progress import LoadProgress
from baton.telemetry import logs

_log = logging.getLogger(__name__)


def main() -> None:
    """Run the rank until its leader is gone."""
    number, beats, pages, *links = (int(word) for word in sys.argv[1:])
    connection: Connection[Any, Any] = Connection(number)
    start: RankStart = connection.recv()
    level, worker, log_format = start.log
    logs.configure(level, f"rank {start.rank}", worker, log_format=log_format)
    config = start.config
    os.sched_setaffinity(0, cores.share(start.rank, config.ranks, config.threads, start.cores))
    prepare(threads=config.threads)
    serve(connection, start, beats, pages, LinkFiles(*links))
    # As services do: unloading torch would take seconds on a busy machine.
    os._exit(0)


def serve(connection: Connection[Any, Any], start: RankStart, beats: int, pages: int, links: LinkFiles) -> None:
    """Run a rank over memory that it shares with others, until the leader closes the connection or is gone."""
    progress = LoadProgress()
    works = [lambda: progress.moves]
    beat(Beats(beats), start.rank, lambda: works[-1]())
    try:
        from baton.engine.factory import load, make_kv_cache, make_runner, place_of
        from baton.model.zeros import SharedMemory

        place = place_of(start.config, start.rank, links, start.floats)
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
    last = place.stage == place.stages - 1
    answers = last and place.stages > 1 and model.parallel.rank == 0
    RankServer(connection, runner, place.links, samples=last, answers=answers).run()


if __name__ == "__main__":
    main()
