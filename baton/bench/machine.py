"""The machine that measures: its parts and versions, the CPU time that its host takes, and this process's memory."""

from __future__ import annotations

import os
import platform
import re
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
