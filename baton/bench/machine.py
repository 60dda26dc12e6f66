"""Facts about a measurement: machine, versions and commit, CPU time that the host takes, memory of this process."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Description of the machine: processor, cores, memory in GiB, Python, and versions of packages."""
    model = re.search(r"model name\s*: (.*)", _text("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+)", _text("/proc/meminfo"))
    return {
        "processor": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "grpcio", "transformers")},
    }


def stolen_s() -> float:
    """Seconds of CPU time that the host has taken from this machine so far; 0 if it does not report them."""
    fields = _text("/proc/stat").partition("\n")[0].split()
    return int(fields[8]) / _TICKS_PER_S if len(fields) > 8 else 0.0


def process_age_s() -> float | None:
    """Seconds since the start of this process, with a resolution of 0.01; None without Linux's /proc."""
    try:
        began = int(_fields("self")[19])
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / _TICKS_PER_S


def memory_bytes(name: str) -> int | None:
    """A size from /proc/self/status: VmRSS is the present one, VmHWM the largest. None without Linux's /proc."""
    found = re.search(rf"^{name}:\s*(\d+) kB", _text("/proc/self/status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


class Provenance:
    """The machine and the commit at the time when this object is made, which is before the measurement.

    A commit that is made during the measurement is not the measured one.
    """

    def __init__(self) -> None:
        self._about = {"machine": machine(), "commit": commit()}
        self._stolen_s = stolen_s()

    def report(self) -> dict[str, Any]:
        """`machine`, `commit` (None outside a git checkout), and `stolen_s`, which the host has taken since then."""
        return {**self._about, "stolen_s": round(stolen_s() - self._stolen_s, 2)}


def commit() -> str | None:
    """The commit of the tree, with "+changes" when it has uncommitted ones other than results."""
    here = Path(__file__).parent
    try:
        name = _git(here, "rev-parse", "--short", "HEAD")
        changed = _git(here, "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)bench/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+changes" if changed else "")


def write(path: Path, report: Any) -> None:
    """Write a report as JSON. Raises OSError."""
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _fields(process: str) -> list[str]:
    """The fields of /proc/.../stat after the process name, which may contain spaces; the first one is field 3."""
    text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(")")[2].split()


def _version(package: str) -> str | None:
    """None if it is not installed: a router needs no torch."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        # Not Linux.
        return ""


def _git(here: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=here, text=True, stderr=subprocess.DEVNULL).strip()
