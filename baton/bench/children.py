"""Processes that benches start and talk with over pipes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from baton.launcher import bound_to_me


def piped(command: Sequence[str]) -> subprocess.Popen[str]:
    """A process that lives no longer than this one, with pipes for standard input and output.

    It has a process group of its own: a terminal's Ctrl-C is for the bench, which ends it.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(bound_to_me(command), stdin=pipe, stdout=pipe, text=True, process_group=0)
