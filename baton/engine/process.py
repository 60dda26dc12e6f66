"""Set up a worker's process before torch is loaded: cores, allocator, huge pages.

A forward pass allocates and frees tensors of megabytes. By default glibc returns such memory to the kernel at once, and
each pass pays for its page faults: an RMSNorm over 512 tokens took ten times as long. Here freed memory is kept
(`baton.process.freed_memory`), in one arena, so that what one thread has freed another can use. Large tensors, weights
above all, lie in huge pages where the kernel grants them on request (`madvise`), which spares misses of the address
cache (`THP_MEM_ALLOC_ENABLE`, torch's allocator).

Compute threads wait for each other by spinning, by default for longer than the kernel's time slice. Two that share a
core, because something else is busy on another, then wait for each other's slices: a step took 1,200 ms instead of
110. They now sleep after some 0.3 ms (`GOMP_SPINCOUNT`), and the kernel finds them another core when they wake.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from pathlib import Path

from baton.errors import ConfigError
from baton.native.library import NativeUnavailable, load
from baton.process import cores, freed_memory

_log = logging.getLogger(__name__)

_COMPUTE = "baton-compute"
_ARENA_MAX = -8
"""A parameter of mallopt, from malloc.h."""


def prepare(cpus: str = "", threads: int = 0) -> None:
    """Set up this process for so many compute threads, 0: one for each usable core; no thread is started here.

    Threads that exist already keep their cores. Raises ConfigError for `cpus`, and for more threads than cores.
    """
    if pinned := cores.available_cpus(cpus):
        os.sched_setaffinity(0, pinned)
    _check_threads(threads)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    freed_memory.keep((1 << 31) - 1)
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def _check_threads(threads: int) -> None:
    """Refuse threads that would share cores, which then wait for each other in turn, or run out of time together."""
    there, usable = cores.affinity(), cores.usable()
    if threads > there:
        raise ConfigError(f"threads: {threads} are more than the {there} cores that this process may use")
    if threads > usable:
        # A quota may be raised while the process runs.
        words = "threads: %d are more than the time of %.3g cores, to which a cgroup limits this process: they stall"
        _log.warning(words, threads, cores.quota())
    elif usable < there:
        # Read by torch's runtime, which knows of no quota, when it is loaded.
        os.environ.setdefault("OMP_NUM_THREADS", str(usable))


def pin_compute_threads() -> None:
    """Give each thread that computes a core of its own: torch's OpenMP team of this thread, and native kernels' pool.

    For a worker that was given its cores. Others stay free, since workers beside them would crowd the same first core.
    To be called once, by the thread that computes; its team is told apart by the name that Linux threads inherit.
    """
    import torch

    places = sorted(os.sched_getaffinity(0))
    caller, tasks = threading.get_native_id(), Path("/proc/self/task")
    (tasks / str(caller) / "comm").write_text(_COMPUTE)
    torch.ones(torch.get_num_threads() << 18).sum()
    team = [int(task.parent.name) for task in tasks.glob("*/comm") if task.read_text().strip() == _COMPUTE]
    for thread, core in zip(sorted(team, key=lambda thread: thread != caller), places, strict=False):
        os.sched_setaffinity(thread, {core})
    with contextlib.suppress(NativeUnavailable, ConfigError):
        load().baton_native_pin((ctypes.c_int32 * len(places))(*places), len(places))
