"""Host memory that is available to this process."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Number of bytes that can be allocated now without swapping, within the limit of the control group if it has one.

    The kernel counts pages of files as available, because it can read them again from disk. Files that this process
    has mapped do not count here: packed weights, which each step reads, may be such a file.
    """
    mapped = _kib(_STATUS, "RssFile") or 0
    limit = _cgroup_available(_CGROUP, mapped)
    system = _meminfo(_MEMINFO, mapped)
    return system if limit is None else min(system, limit)


def _meminfo(path: Path, mapped: int) -> int:
    found = _kib(path, "MemAvailable")
    # Other systems than Linux: half of the installed memory.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if found is None else max(0, found - mapped)


def _kib(path: Path, name: str) -> int | None:
    """Number of bytes in the line `name:  value kB` of a file in /proc; None if there is no such line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _cgroup_available(folder: Path, mapped: int) -> int | None:
    """Number of bytes that a version 2 control group may still use; None if it has no limit.

    The file cache counts as free, except `mapped` bytes.
    """
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = (folder / "memory.current").read_text(encoding="ascii").strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    cache = max(0, int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0)) - mapped)
    return min(int(limit), max(0, int(limit) - int(used) + cache)) if limit.isdigit() else None
