"""A small fleet of real processes with the fake engine: for measuring lines, slots and cancels, not arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.services import started


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
        prefill = stack.enter_context(started([*worker, "prefill", *prefill_flags]))
        decode = stack.enter_context(started([*worker, "decode", *decode_flags]))
        places = ["--prefill", prefill["control"], "--decode", decode["control"]]
        router = stack.enter_context(started(["-m", "router", *places, *router_flags]))
        yield FakeFleet(
            router["grpc"], prefill["control"], decode["control"], (prefill["ops"], decode["ops"], router["ops"])
        )
