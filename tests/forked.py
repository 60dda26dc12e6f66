"""Services as real processes that start in a fraction of a second: copies of a process that has imported them.

    async with Forker.running() as forker:
        process = await forker.start(log, "decode_svc", "--model", …)
        process.send(signal.SIGTERM)
        assert await process.ended == 0

`python -m tests.forked` is that process. It reads a JSON list [log, module, flag, …] from each line of its standard
input, and writes "started PID" at once and "ended PID STATUS" later. All processes end with it, and it ends with its
input.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import traceback
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Forked:
    """A process; `ended` gets its exit status, negative for a signal."""

    pid: int
    ended: asyncio.Future[int]

    def send(self, number: signal.Signals) -> None:
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Forker:
    """Starts services as copies of one process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._starts: deque[asyncio.Future[Forked]] = deque()
        self._running: dict[int, Forked] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls) -> AsyncIterator[Forker]:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE)
        forker = cls(process)
        reading = asyncio.create_task(forker._read())
        try:
            yield forker
        finally:
            process.kill()
            await asyncio.gather(process.wait(), reading)

    async def start(self, log: Path, module: str, *flags: str) -> Forked:
        """Run `python -m module` with these flags; its output goes to `log`."""
        started: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._starts.append(started)
        self._process.stdin.write(json.dumps([str(log), module, *flags]).encode() + b"\n")
        return await started

    async def _read(self) -> None:
        while line := await self._process.stdout.readline():
            word, *numbers = line.split()
            pid = int(numbers[0])
            if word == b"started":
                forked = self._running[pid] = Forked(pid, asyncio.get_running_loop().create_future())
                self._starts.popleft().set_result(forked)
            else:
                self._running.pop(pid).ended.set_result(int(numbers[1]))


def main() -> None:
    import decode_svc.__main__
    import decode_svc.app
    import prefill_svc.__main__
    import prefill_svc.app
    import router.__main__
    from baton.config.router import RouterConfig
    from baton.config.worker import DecodeConfig, PrefillConfig
    from baton.engine import factory  # noqa: F401
    from baton.process.service import main as serve

    services = {
        "router": ("router", RouterConfig, router.__main__.start),
        "prefill_svc": ("prefill", PrefillConfig, prefill_svc.__main__.start),
        "decode_svc": ("decode", DecodeConfig, decode_svc.__main__.start),
    }
    told = b""
    while True:
        if select.select([0], [], [], POLL_S)[0]:
            if not (read := os.read(0, 1 << 16)):
                return
            told += read
        *lines, told = told.split(b"\n")
        for line in lines:
            log, module, *flags = json.loads(line)
            pid = os.fork()
            if not pid:
                try:
                    _become(log, module, flags)
                    role, settings, start = services[module]
                    serve(role, module, settings, start)
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            print("started", pid, flush=True)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                print("ended", ended[0], os.waitstatus_to_exitcode(ended[1]), flush=True)


def _become(log: str, module: str, flags: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    null, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, number in ((null, 0), (out, 1), (out, 2)):
        os.dup2(target, number)
    sys.argv = [module, *flags]


if __name__ == "__main__":
    main()
