"""The machine that measures: what it is, and what the host and the processes took of it."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CPU_TICK_S = 1 / _TICKS_PER_S
"""To which CPU times are known."""


def machine() -> dict[str, Any]:
    """What ran it: processor, cores, memory in GiB, Python and the versions that matter."""
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
    """Seconds of CPU time that the host has taken from this machine so far; 0 where it does not tell."""
    fields = _text("/proc/stat").partition("\n")[0].split()
    return int(fields[8]) / _TICKS_PER_S if len(fields) > 8 else 0.0


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that live (Linux), to CPU_TICK_S."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ticks = 0
    for each in (str(pid), *children):
        fields = _fields(each)
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def process_age_s() -> float | None:
    """Seconds since this process began, to a hundredth; None where Linux's /proc is not."""
    try:
        began = int(_fields("self")[19])
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / _TICKS_PER_S


def memory_bytes(name: str) -> int | None:
    """A size from /proc/self/status: VmRSS now, VmHWM at most. None where Linux's /proc is not."""
    found = re.search(rf"^{name}:\s*(\d+) kB", _text("/proc/self/status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _fields(process: str) -> list[str]:
    """The fields of a process's /proc/.../stat behind its name, which may hold spaces: they begin with the third."""
    text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(")")[2].split()


def _version(package: str) -> str | None:
    """None where it is not installed: a router needs no torch."""
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
