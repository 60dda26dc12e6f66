"""The host memory that can be allocated."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that could be allocated now without swapping, within the control group's limit if there is one.

    The kernel counts what it could drop and read again from a disk. Of that, what this process has mapped is not
    available: packed weights, which each step reads, may be a file on a disk.
    """
    mapped = _kib(_STATUS, "RssFile") or 0
    limit = _cgroup_available(_CGROUP, mapped)
    system = _meminfo(_MEMINFO, mapped)
    return system if limit is None else min(system, limit)


def _meminfo(path: Path, mapped: int) -> int:
    found = _kib(path, "MemAvailable")
    # Not Linux: half of what is installed.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if found is None else max(0, found - mapped)


def _kib(path: Path, name: str) -> int | None:
    """Bytes of a line `name:  value kB` of a file in /proc; None without it."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _cgroup_available(folder: Path, mapped: int) -> int | None:
    """Limit minus use of a version 2 control group; None without a limit. Its file cache gives way, `mapped` does not.

    Pages that another group has read first are not in this one's cache.
    """
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = (folder / "memory.current").read_text(encoding="ascii").strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    cache = max(0, int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0)) - mapped)
    return min(int(limit), max(0, int(limit) - int(used) + cache)) if limit.isdigit() else None
