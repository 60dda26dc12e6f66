"""The host memory that can be allocated."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that could be allocated now without swapping, within the control group's limit if there is one."""
    limit = _cgroup_room(_CGROUP)
    system = _meminfo(_MEMINFO)
    return system if limit is None else min(system, limit)


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: half of what is installed.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_room(folder: Path) -> int | None:
    """Limit minus use of a version 2 control group, whose file cache gives way; None without a limit."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = (folder / "memory.current").read_text(encoding="ascii").strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    cache = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return min(int(limit), max(0, int(limit) - int(used) + cache)) if limit.isdigit() else None
