"""A runner: a process that measures when it is told to, in the Python of what it measures.

It speaks lines of JSON: when it is ready `{"ready": {...}}`, then for each line such as
`{"decode": {"batch": 8, "context": 128, "steps": 16}}` one answer: `{"seconds": 1.23}`, or `{"error": "..."}`. It ends
when its standard input does. Only the standard library: the environments of runners have no Baton.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

Command = Callable[..., dict[str, Any]]
LOW_ID, HIGH_ID = 1000, 100000


def serve(load: Callable[[], tuple[dict[str, Any], dict[str, Command]]]) -> None:
    """Load, report the description that `load` returns, and run commands by name until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    # Whatever libraries print goes beside the answers, not between them.
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    about, commands = load()
    say({"ready": about})
    for line in sys.stdin:
        try:
            ((name, arguments),) = json.loads(line).items()
            answer = commands[name](**arguments)
        except Exception:
            answer = {"error": traceback.format_exc()}
        say(answer)


def prompt(tokens: int, vocabulary: int = HIGH_ID) -> list[int]:
    """Random token ids."""
    return random.choices(range(min(LOW_ID, vocabulary // 2), min(HIGH_ID, vocabulary)), k=tokens)
