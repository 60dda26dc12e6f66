"""A small fleet of real processes with the fake engine: for measuring lines, slots and cancels, not arithmetic."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.launcher import bound_to_me

SECRET = "a secret of the bench"


@dataclass(frozen=True, slots=True)
class FakeFleet:
    """Addresses, "host:port": the router's and the workers' gRPC, and everybody's ops."""

    router: str
    prefill: str
    decode: str
    ops: tuple[str, ...]


@contextlib.contextmanager
def fake_fleet(
    *, prefill_flags: Sequence[str] = (), decode_flags: Sequence[str] = (), router_flags: Sequence[str] = ()
) -> Iterator[FakeFleet]:
    """One prefill and one decode worker with fake engines, and a router, until the block ends."""
    with contextlib.ExitStack() as stack:
        worker = ["-m", "tests.chaos.process"]
        prefill = stack.enter_context(_started([*worker, "prefill", *prefill_flags]))
        decode = stack.enter_context(_started([*worker, "decode", *decode_flags]))
        places = ["--prefill", prefill["control"], "--decode", decode["control"]]
        router = stack.enter_context(_started(["-m", "router", *places, *router_flags]))
        yield FakeFleet(
            router["grpc"], prefill["control"], decode["control"], (prefill["ops"], decode["ops"], router["ops"])
        )


@contextlib.contextmanager
def _started(arguments: Sequence[str]) -> Iterator[dict[str, str]]:
    """A process and what its line "listening ..." tells; it is told to stop at the end."""
    command = bound_to_me([sys.executable, *arguments])
    environ = {**os.environ, "BATON_FLEET_SECRET": SECRET, "BATON_LOG_LEVEL": "warning"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line.startswith("listening "):
                raise RuntimeError(f"{' '.join(arguments)} did not listen")
            yield dict(re.findall(r"(\w+)=(\S+)", line))
        finally:
            process.terminate()
            process.wait(60)
