"""Setup of a worker's process before torch is loaded: cores, allocator, huge pages.

A forward pass allocates and frees tensors of megabytes. By default glibc returns such memory to the kernel at once, and
each pass pays for its page faults: an RMSNorm over 512 tokens took ten times as long. So the process keeps freed memory
(`baton.process.allocator`), in one arena, so that every thread can use it again. torch's allocator asks for huge
pages for large tensors (`THP_MEM_ALLOC_ENABLE`), which saves misses of the address cache.

Compute threads wait for each other in a busy loop, by default for longer than the kernel's time slice. If two of them
share a core, because another core is busy, each waits until the time slice of the other ends: a step took 1,200 ms
instead of 110 ms. Here they sleep after about 0.3 ms (`GOMP_SPINCOUNT`), and the kernel can wake them on another core.
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
from baton.process import allocator, cores

_log = logging.getLogger(__name__)

_COMPUTE = "baton-compute"


def prepare(cpus: str = "", threads: int = 0, ranks: int = 1) -> None:
    """Set up this process for `threads` compute threads, or for one on each usable core if it is 0.

    `ranks` processes have as many threads each, on the same cores. `cpus` lists the cores to use, such as "0-3,8"; ""
    means all. No thread is started; threads that exist keep their cores. Raises ConfigError if `cpus` is invalid, or if
    there are more threads than cores.
    """
    if pinned := cores.available_cpus(cpus):
        os.sched_setaffinity(0, pinned)
    _check_threads(threads, ranks)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    allocator.keep_freed((1 << 31) - 1)
    allocator.use_one_arena()


def _check_threads(threads: int, ranks: int) -> None:
    """Raise ConfigError if there are more threads than cores; warn if a cgroup gives less time than they need."""
    there, usable = cores.affinity(), cores.usable()
    if threads > there:
        raise ConfigError(f"threads: {threads} are more than the {there} cores that this process may use")
    if threads > usable:
        # A quota may be raised while the process runs.
        words = "threads: %d are more than the time of %.3g cores, to which a cgroup limits this process: they stall"
        _log.warning(words, threads, cores.quota())
    elif (total := max(1, threads) * ranks) > usable and ranks > 1:
        words = "%d ranks have %d compute threads, on %d cores: they wait for each other"
        _log.warning(words, ranks, total, usable)
    elif usable < there:
        # torch's runtime reads this when it is loaded; it does not know the quota.
        os.environ.setdefault("OMP_NUM_THREADS", str(usable))


def pin_compute_threads() -> None:
    """Pin each compute thread to one core: this thread's OpenMP team in torch, and the threads of native kernels.

    Only for a worker with cores of its own: without them, several workers would pin threads to the same cores. Call it
    once, on the thread that computes. The threads of its team are found by their name, which Linux threads inherit.
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
