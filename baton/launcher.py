"""Commands whose processes can't outlive the process that starts them.

The command is run by a tiny interpreter, which asks the kernel (Linux) for SIGKILL at the end of its parent, and then
becomes the command. So even a parent that is killed leaves no process behind. The child ends at the end of the
*thread* that started it: start children from the main thread, or from another one that lives long enough.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# prctl(PR_SET_PDEATHSIG = 1, SIGKILL = 9). If the parent died before this call, the parent id has changed.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def bind_to_parent(command: Sequence[str]) -> list[str]:
    """`command`, whose first word is the path of an executable, so that its process ends with this one."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
