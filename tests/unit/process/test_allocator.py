"""Memory that was freed is used again without page faults."""

import subprocess
import sys

import pytest

BLOCK = 20 << 20
FAULTS = f"""
import resource
import threading
from baton.process import allocator

allocator.use_one_arena()
allocator.keep_freed(2 * {BLOCK})
allocator.prefault({BLOCK} + 4096)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    thread = threading.Thread(target=lambda: b"1" * {BLOCK})
    thread.start()
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_blocks_of_the_prepared_size_cost_no_page_faults_on_any_thread() -> None:
    faults = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60)
    assert int(faults.stdout) < BLOCK // 4096 // 10
