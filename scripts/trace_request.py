"""Files and types that one request enters, from the client to its answer.

    python scripts/trace_request.py [--list]

A file or a type is entered if one of its functions runs for the request and does not run in a fleet without work. Code
of every call is left out: settings, metrics and logs, errors and their gRPC statuses, and generated stubs.

A router, a prefill worker and a decode worker run in this process, with the bundled checkpoint and gRPC between them.
After a first request, which pays for imports, a profiler watches all threads: first without work, then while a second
request runs. Helpers count like the rest. A type counts by its methods, those that `dataclass` writes included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from baton import AsyncClient

PACKAGES = ("baton", "router", "prefill_svc", "decode_svc")
PLUMBING = ("baton.config", "baton.telemetry", "baton.errors", "baton.rpc.errors", "baton.pb")
"""Modules that every call crosses."""

ROOT = Path(__file__).resolve().parent.parent
IDLE_S = 3.0

Function: TypeAlias = tuple[CodeType, type | None]
"""A function, and the type of its `self`."""


class Recorder:
    """Records functions while `record` runs."""

    def __init__(self) -> None:
        self._found: set[Function] | None = None

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """The profile function of all threads (`sys.setprofile`)."""
        if event == "call" and self._found is not None:
            code = frame.f_code
            owner = frame.f_locals.get("self") if code.co_argcount and code.co_varnames[0] == "self" else None
            self._found.add((code, None if owner is None else type(owner)))

    @contextlib.contextmanager
    def record(self) -> Iterator[set[Function]]:
        """The functions until the block ends."""
        found: set[Function] = set()
        self._found = found
        try:
            yield found
        finally:
            self._found = None


def file_of(code: CodeType) -> str | None:
    """Path of a function's file within the repository; None if it is not Baton's, or plumbing."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    inside = path.relative_to(ROOT)
    return str(inside) if _counts(".".join(inside.with_suffix("").parts)) else None


def name_of(owner: type | None) -> str | None:
    """Full name of a type; None if it is not Baton's, or plumbing."""
    return f"{owner.__module__}.{owner.__qualname__}" if owner is not None and _counts(owner.__module__) else None


def _counts(module: str) -> bool:
    plumbing = any(module == each or module.startswith(f"{each}.") for each in PLUMBING)
    return module.split(".")[0] in PACKAGES and not plumbing


async def trace(recorder: Recorder) -> tuple[set[Function], set[Function]]:
    """Functions of a fleet without work, and of one request."""
    # Imported here, so that every thread that they start is profiled.
    import decode_svc.app
    import prefill_svc.app
    import router.app
    from baton import AsyncClient
    from baton.config.router import RouterConfig
    from baton.config.worker import DecodeConfig, PrefillConfig

    async with contextlib.AsyncExitStack() as fleet:
        prefill = await fleet.enter_async_context(prefill_svc.app.run(PrefillConfig(threads=1)))
        decode = await fleet.enter_async_context(decode_svc.app.run(DecodeConfig(threads=1)))
        config = RouterConfig(prefill=(prefill.addresses.control,), decode=(decode.addresses.control,))
        front = await fleet.enter_async_context(router.app.run(config))
        client = await fleet.enter_async_context(AsyncClient(front.address))
        await _ask(client, "import os\n\n\ndef first(")
        with recorder.record() as idle:
            await asyncio.sleep(IDLE_S)
        with recorder.record() as busy:
            await _ask(client, "import sys\n\n\ndef second(")
    return idle, busy


async def _ask(client: AsyncClient, prompt: str) -> None:
    async for _ in client.generate(prompt, max_tokens=16, temperature=0):
        pass


def main() -> None:
    """Print the counts, and with --list the names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names too")
    arguments = parser.parse_args()
    recorder = Recorder()
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
    idle, busy = asyncio.run(trace(recorder))
    background = {code for code, _ in idle}
    own = [(code, owner) for code, owner in busy if code not in background]
    files = {file for code, _ in own if (file := file_of(code))}
    types = {name for _, owner in own if (name := name_of(owner))}
    if arguments.list:
        print("\n".join([*sorted(files), "", *sorted(types), ""]))
    print(f"files entered: {len(files)}\ntypes entered: {len(types)}")


if __name__ == "__main__":
    main()
