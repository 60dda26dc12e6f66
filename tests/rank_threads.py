"""Ranks of an engine as threads of the test, which start at once. Only for torch's operators: the compute threads of
native kernels serve one call at a time in a process.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from baton.engine.rank import serve
from baton.engine.ranks import ExchangeFiles


class RankThread:
    """A rank on a thread (`baton.engine.ranks.StartRank`). It has a process that does nothing, whose end is that of the
    rank.
    """

    def __init__(self, rank: int, files: Sequence[int]) -> None:
        self._process = subprocess.Popen(["sleep", "infinity"])
        self.pid = self._process.pid
        self.kill, self.wait = self._process.kill, self._process.wait
        # The leader closes its own descriptors.
        connection, beats, pages, *exchanges = (os.dup(file) if file >= 0 else -1 for file in files)
        memory = beats, pages, ExchangeFiles(*exchanges)
        run = threading.Thread(
            target=self._run, args=(Connection(connection), memory), name=f"rank {rank}", daemon=True
        )
        run.start()

    def _run(self, connection: Connection[Any, Any], memory: tuple[int, int, ExchangeFiles]) -> None:
        with connection:
            serve(connection, connection.recv(), *memory)
        self.kill()
