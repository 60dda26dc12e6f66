"""A fleet that `baton up` starts, with any of its arguments.

with up(["--mixed=1"], model=directory) as router:
    client = AsyncClient(router.grpc)
"""

from __future__ import annotations

import contextlib
import re
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.children import ChildFailed, child

DEFAULTS: Mapping[str, Any] = {"grpc": "127.0.0.1:0", "redis": "none", "log-level": "warning"}
_STOP_S, _HTTP_S = 60.0, 10.0
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Router:
    """Addresses of the router, "host:port"."""

    grpc: str
    ops: str
    http: str = ""
    """Empty without `--http`."""

    def counters(self, pattern: str) -> dict[str, float]:
        """Values of the router's counters whose names match, by name and labels."""
        with urllib.request.urlopen(f"http://{self.ops}/metrics", timeout=_HTTP_S) as answer:
            text = answer.read().decode()
        return {
            f"{name}{{{labels}}}" if labels else name: float(value)
            for name, labels, value in _SAMPLE.findall(text)
            if re.fullmatch(pattern, name)
        }


@contextlib.contextmanager
def up(arguments: Sequence[str], *, model: Path | str, **settings: Any) -> Iterator[Router]:
    """Start a fleet and wait until it is ready. `settings` become flags, except those that `arguments` have.

    Raises ChildFailed if it does not start.
    """
    given = {each.partition("=")[0] for each in arguments}
    flags = {**DEFAULTS, "model": model, **{name.replace("_", "-"): value for name, value in settings.items()}}
    rest = [f"--{name}={value}" for name, value in flags.items() if f"--{name}" not in given]
    command = [sys.executable, "-m", "baton", "up", *rest, *arguments]
    with child(command, name="baton up", grace_s=_STOP_S) as fleet:
        line = fleet.line()
        if not line.startswith("ready "):
            raise ChildFailed(f"baton up says {line!r}: {fleet.output_tail()}")
        where = dict(re.findall(r"(\w+)=(\S+)", line))
        yield Router(where["grpc"], where["ops"], where.get("http", ""))
