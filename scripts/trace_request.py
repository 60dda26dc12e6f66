"""Files and types that one request crosses, from the client to its answer.

    python scripts/trace_request.py [--list]

A router, a prefill worker and a decode worker run in this process, with the bundled checkpoint and gRPC between them.
After a first request, which pays for imports, a profiler watches all threads while a second one runs. Two counts:

    crossed   functions that hand the request on: those on the stack when a gRPC message is written or read, when work
              goes to another thread, or when a waiting task is woken. A reader who follows the request opens these.
    entered   all functions, helpers included.

Functions that also run without a request (heartbeats, status) do not count. A type counts by its methods.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from baton import AsyncClient

PACKAGES = ("baton", "router", "prefill_svc", "decode_svc")
ROOT = Path(__file__).resolve().parent.parent
IDLE_S = 3.0

# Functions of grpc.aio, and of the standard library (in C or in Python), that hand something on.
_MESSAGES = {"write", "read", "__aiter__", "__anext__"}
_WAKING = {"put", "put_nowait", "set", "set_result", "submit", "call_soon_threadsafe"}

Function: TypeAlias = tuple[CodeType, type | None]


@dataclass
class Functions:
    """Functions that were entered, each with the type of its `self`; `crossed` are those that handed something on."""

    entered: set[Function] = field(default_factory=set)
    crossed: set[Function] = field(default_factory=set)


class Recorder:
    """Records functions while `record` runs."""

    def __init__(self) -> None:
        self._found: Functions | None = None

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """The profile function of all threads (`sys.setprofile`)."""
        found = self._found
        if found is None or event not in ("call", "c_call"):
            return
        if event == "call":
            found.entered.add(_function(frame))
            name, file = frame.f_code.co_name, frame.f_code.co_filename
            crosses = name in _MESSAGES if "grpc/aio" in file else name in _WAKING and not file.startswith(str(ROOT))
        else:
            crosses = getattr(argument, "__name__", "") in _WAKING
        if crosses:
            stack: FrameType | None = frame
            while stack is not None:
                found.crossed.add(_function(stack))
                stack = stack.f_back

    @contextlib.contextmanager
    def record(self) -> Iterator[Functions]:
        """The functions until the block ends."""
        self._found = found = Functions()
        try:
            yield found
        finally:
            self._found = None


def _function(frame: FrameType) -> Function:
    code = frame.f_code
    owner = frame.f_locals.get("self") if code.co_argcount and code.co_varnames[0] == "self" else None
    return code, None if owner is None else type(owner)


def file_of(code: CodeType) -> str | None:
    """Path of a function's file within the repository; None if it is not Baton's."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or "pb" in path.parts:
        return None
    inside = path.relative_to(ROOT)
    return str(inside) if inside.parts[0] in PACKAGES else None


def name_of(owner: type | None) -> str | None:
    """Full name of a type; None if it is not Baton's."""
    if owner is None or owner.__module__.split(".")[0] not in PACKAGES or ".pb" in owner.__module__:
        return None
    return f"{owner.__module__}.{owner.__qualname__}"


async def trace(recorder: Recorder) -> tuple[Functions, Functions]:
    """Functions of a fleet without work, and of one request."""
    # Imported here, so that every thread that they start is profiled.
    import decode_svc.app
    import prefill_svc.app
    import router.app
    from baton import AsyncClient
    from baton.config.decode import DecodeConfig
    from baton.config.prefill import PrefillConfig
    from baton.config.router import RouterConfig

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
    background = {code for code, _ in idle.entered}
    for count, functions in (("entered", busy.entered), ("crossed", busy.crossed)):
        own = [(code, owner) for code, owner in functions if code not in background]
        files = {file for code, _ in own if (file := file_of(code))}
        types = {name for _, owner in own if (name := name_of(owner))}
        if arguments.list:
            print("\n".join(["", *sorted(files), "", *sorted(types), ""]))
        print(f"{count}: {len(files)} files, {len(types)} types")


if __name__ == "__main__":
    main()
