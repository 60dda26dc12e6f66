"""The number of cores that this process may use: by its affinity, and by the CPU time that its cgroups grant it.

The affinity (taskset, cpusets, `docker --cpuset-cpus`) is a set of cores. A quota (`docker --cpus`, limits of
Kubernetes) is CPU time in each period: if more threads than that run, all of them stop until the next period begins.
The quota counts as that number of cores, rounded up, as in Go and the JVM.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from baton.config.values import parse_cpus
from baton.errors import ConfigError

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def available_cpus(text: str) -> frozenset[int]:
    """Core numbers of a list like "0-3,8". Raises ConfigError for a bad list or a core that may not be used here."""
    cpus = parse_cpus(text)
    if missing := sorted(cpus and cpus - os.sched_getaffinity(0)):
        raise ConfigError(f"cpus: core {missing[0]} is not available to this process, got {text!r}")
    return cpus


def affinity() -> int:
    """Cores that the kernel may run this process on; the calling thread may have fewer."""
    return len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(number: int, count: int, threads: int, among: Sequence[int]) -> frozenset[int]:
    """The cores of process `number` of `count` that compute together, with `threads` threads each.

    Their sets are disjoint, so that none waits for a core that another one uses. A scheduler may keep processes that
    wake each other on one core: a step of two ranks then took twice as long. A set has neighbours: cores of one socket,
    and all hardware threads of a core. All of `among`, if they are too few.
    """
    if len(among) < count * max(1, threads):
        return frozenset(among)
    ordered, size = sorted(among, key=_place), len(among)
    return frozenset(ordered[size * number // count : size * (number + 1) // count])


def _place(cpu: int) -> tuple[int, ...]:
    """The socket and the core of a hardware thread, as far as they are known, and its own number."""
    folder, found = _CPUS / f"cpu{cpu}" / "topology", []
    for name in ("physical_package_id", "core_id"):
        try:
            found.append(int((folder / name).read_text()))
        except (OSError, ValueError):
            found.append(0)
    return (*found, cpu)


def threads_each(count: int) -> int:
    """Number of compute threads of each of `count` processes that compute together, on the cores of the caller."""
    return max(1, usable() // count)


def usable() -> int:
    """Number of cores for compute threads: those of the affinity, or fewer if the quota does not cover all of them."""
    limit = quota()
    return affinity() if limit is None else max(1, min(affinity(), math.ceil(limit)))


def quota(groups: Path = _GROUPS, mount: Path = _MOUNT) -> float | None:
    """Number of cores whose full time the cgroups of this process allow; None without a limit.

    `groups` and `mount` are the kernel's files (cgroups(7)): v2 has `cpu.max`, v1 `cpu.cfs_quota_us`. The limits of all
    parent groups count too. A container sees its own group as the root of the mount.
    """
    limits = [limit for group in _own(groups, mount) if (limit := _limit(group)) is not None]
    return min(limits, default=None)


def _own(groups: Path, mount: Path) -> list[Path]:
    """Directories of the groups that this process is in, and of their parents."""
    found = []
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = mount / controllers if controllers else mount
            inner = PurePosixPath(path.lstrip("/"))
            found += [root / each for each in (inner, *inner.parents)]
    return found


def _limit(group: Path) -> float | None:
    """A group's own limit in cores."""
    with contextlib.suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            time, period = (group / "cpu.max").read_text().split()
        else:
            time, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        # "max" is no number, and v1 says -1.
        return int(time) / int(period) if int(time) > 0 and int(period) > 0 else None
    return None
