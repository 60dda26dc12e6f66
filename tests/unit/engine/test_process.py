"""A worker's process: the cores it keeps to, and memory that stays with it."""

import os
import subprocess
import sys

import pytest

from tests.kernels import needs_native

FAULTS = """
import resource, sys
if sys.argv[1] == "prepared":
    from baton.engine.process import prepare
    prepare()
import torch

def used(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(size, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

used(64 << 20)
print(used(64 << 20))
"""

CORES = """
import os, sys
from baton.engine.process import prepare
prepare(sys.argv[1], 1)
import torch
print(sorted(os.sched_getaffinity(0)), torch.get_num_threads())
"""

THREADS = """
import sys
from baton.process import cores
from baton.engine.process import prepare
cpus, threads, quota = sys.argv[1].split(" ")
if quota != "None":
    cores.affinity, cores.quota = lambda: 4, lambda: float(quota)
prepare(cpus, int(threads))
import torch
if int(threads):
    torch.set_num_threads(int(threads))
print(torch.get_num_threads())
"""


PINNED = """
import os, threading
from baton.engine.process import pin_compute_threads, prepare
prepare(",".join(map(str, sorted(os.sched_getaffinity(0)))))
import torch
done, end = threading.Event(), threading.Event()
threading.Thread(target=lambda: (pin_compute_threads(), done.set(), end.wait())).start()
done.wait()
names = {task: open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}
print(sorted(sorted(os.sched_getaffinity(int(task))) for task in names if names[task] == "baton-compute"))
print(len(os.sched_getaffinity(0)))
end.set()
"""


NATIVE = """
import os, threading
from baton.engine.process import pin_compute_threads, prepare
from baton.native.library import load
prepare(",".join(map(str, sorted(os.sched_getaffinity(0)))))
import torch
count, before = len(os.sched_getaffinity(0)), set(os.listdir("/proc/self/task"))
load().baton_native_start(count)
pool = set(os.listdir("/proc/self/task")) - before
pin_compute_threads()
print(sorted(sorted(os.sched_getaffinity(int(task))) for task in pool))
"""


def run(program: str, argument: str) -> subprocess.CompletedProcess[str]:
    # Whoever prepared this very process, in another test, has set them.
    ours = {"OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT"}
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run([sys.executable, "-c", program, argument], capture_output=True, text=True, env=environ)


def test_pinned_to_a_core() -> None:
    core = max(os.sched_getaffinity(0))
    assert run(CORES, str(core)).stdout.strip() == f"[{core}] 1"


@needs_native
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the caller has the only core")
def test_threads_of_native_kernels_have_cores_beside_the_callers() -> None:
    assert run(NATIVE, "").stdout.strip() == str([[core] for core in sorted(os.sched_getaffinity(0))[1:]])


def test_each_compute_thread_has_a_core() -> None:
    """OpenMP threads of the thread that computes have a core each, and no other threads have."""
    cores = sorted(os.sched_getaffinity(0))
    team, free = run(PINNED, "").stdout.splitlines()
    assert team == str([[core] for core in cores])
    assert int(free) == len(cores)


def test_a_core_that_is_not_there_is_named() -> None:
    found = run(CORES, "99999")
    assert found.returncode != 0
    assert "cpus: core 99999 is not available to this process" in found.stderr


def test_more_threads_than_cores_are_refused() -> None:
    core = max(os.sched_getaffinity(0))
    found = run(THREADS, f"{core} 2 None")
    assert found.returncode != 0
    assert "threads: 2 are more than the 1 cores that this process may use" in found.stderr


def test_a_quota_limits_the_threads_and_is_said_where_there_are_more() -> None:
    """The affinity is pretended: the machine may have a single core."""
    assert run(THREADS, " 0 0.5").stdout.strip() == "1"
    found = run(THREADS, " 3 1.5")
    assert found.stdout.strip() == "3"
    assert "threads: 3 are more than the time of 1.5 cores" in found.stderr


def test_freed_memory_is_used_again() -> None:
    """The second of two tensors of 64 MiB costs no page faults to speak of; without the settings, thousands."""
    assert int(run(FAULTS, "plain").stdout) > 5_000
    assert int(run(FAULTS, "prepared").stdout) < 2_500
