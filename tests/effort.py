"""Effort of the property and fuzz tests, and a count of what they have tried.

`make test` runs a few examples, the same ones each time. With FUZZ_EXAMPLES in the environment, as `make fuzz` sets it,
that many percent of these are run, seeded with FUZZ_SEED. As a pytest plugin (`-p tests.effort`) this module prints the
number of inputs tried, and writes them to the file that FUZZ_REPORT names, if it does.
"""

import functools
import inspect
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings

from baton.bench.machine import commit

PERCENT = int(os.environ.get("FUZZ_EXAMPLES", "100"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
TRIED: Counter[str] = Counter()
"""Inputs tried, by what they were tried on."""

_BEGAN = time.monotonic()
_SHARED: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", derandomize=True, **_SHARED)
settings.register_profile("long", print_blob=True, **_SHARED)
PROFILE = "long" if "FUZZ_EXAMPLES" in os.environ else "ci"
"""Of hypothesis, for all tests: no deadlines, which a busy machine misses."""


def scaled(count: int) -> int:
    """`count` as `make test` means it, for the effort asked for."""
    return max(1, count * PERCENT // 100)


def effort(examples: int, steps: int = 50) -> settings:
    """Settings of a hypothesis test that runs `examples` in `make test`, of `steps` rules each if it is stateful."""
    return settings(settings.get_profile(PROFILE), max_examples=scaled(examples), stateful_step_count=steps)


def machine_test(machine: type[Any], examples: int, steps: int = 50) -> type[Any]:
    """The test case of a state machine, counted by its name."""
    plain = machine.__init__

    @functools.wraps(plain)
    def counted(self: Any) -> None:
        TRIED[machine.__name__] += 1
        plain(self)

    machine.__init__ = counted  # type: ignore[misc]
    case: type[Any] = machine.TestCase
    case.settings = effort(examples, steps)
    if "FUZZ_EXAMPLES" not in os.environ:
        return case
    # So many examples may take longer than any test of `make test` should.
    long: type[Any] = pytest.mark.timeout(0)(seed(SEED)(case))
    return long


def fuzz(what: str, count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call the test with `rng`, a seeded generator, `count` times; a failure names seed and number of the input."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name != "rng"]

        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run_async(**fixtures: Any) -> None:
                for number, rng in generators(what, count):
                    with named(what, number):
                        await test(rng=rng, **fixtures)

            run: Callable[..., Any] = run_async
        else:

            @functools.wraps(test)
            def run(**fixtures: Any) -> None:
                for number, rng in generators(what, count):
                    with named(what, number):
                        test(rng=rng, **fixtures)

        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate


def generators(what: str, count: int) -> Iterator[tuple[int, random.Random]]:
    """The number and the generator of each input to be tried; counts them."""
    for number in range(scaled(count)):
        TRIED[what] += 1
        yield number, random.Random(f"{SEED}/{what}/{number}")


@contextmanager
def named(what: str, number: int) -> Iterator[None]:
    """Name the input in what is raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"input {number} of {what!r}, FUZZ_SEED={SEED}")
        raise


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was tried."""
    stats = {kind: terminalreporter.stats.get(kind, []) for kind in ("passed", "failed", "error")}
    lines = [
        f"# Property tests and fuzzing, {date.today()}",
        "",
        f"`make fuzz FUZZ_EXAMPLES={PERCENT} SEED={SEED}` at {commit()}, {time.monotonic() - _BEGAN:.0f} s, "
        f"{len(stats['passed'])} tests passed. A state machine's input is a sequence of up to 50 steps.",
        "",
        *(f"- failed: {each.nodeid}" for kind in ("failed", "error") for each in stats[kind]),
        *(f"- {count:,} {what}" for what, count in sorted(TRIED.items())),
        f"- {TRIED.total():,} in all",
    ]
    for line in lines:
        terminalreporter.write_line(line)
    if path := os.environ.get("FUZZ_REPORT"):
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
