"""`baton up` loses all its decode workers, and when they are back all its prefill workers, under streams."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

from baton import Client
from baton.completion import Completion
from tests.integration.test_cli import family, running

LONG, SHORT = 250, 12
PROMPTS = [f"def function_{number}(value):\n    " for number in range(8)]
AT_MOST_S = 240
"""Only a hang takes so long."""


def read(client: Client, prompt: str, max_tokens: int, begun: Event) -> list[int]:
    """The tokens of a stream; sets `begun` at the third delta."""
    completion = Completion()
    deltas = client.generate(prompt, timeout=AT_MOST_S, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    for number, delta in enumerate(deltas):
        completion.add(delta)
        if number == 2:
            begun.set()
    return completion.token_ids


def kill(supervisor: int, role: str) -> None:
    """Kill all workers of a role at once."""
    pids = [pid for pid, command in family(supervisor).items() if f"-m {role}_svc" in command]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def wait_for(log: Path, words: str, times: int) -> None:
    """Wait until the log has said something so often."""
    until = time.monotonic() + AT_MOST_S
    while log.read_text().count(words) < times:
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def test_streams_outlive_the_death_of_a_whole_role_and_new_ones_wait_for_it(tmp_path: Path) -> None:
    flags = ("--redis=none", "--prefill=2", "--decode=2", "--log-level=info")
    with running(tmp_path, *flags) as (up, target, log), Client(target) as client, ThreadPoolExecutor(32) as pool:

        def start(max_tokens: int) -> list[tuple[Future[list[int]], Event]]:
            events = [Event() for _ in PROMPTS]
            return [
                (pool.submit(read, client, *each), each[-1])
                for each in zip(PROMPTS, [max_tokens] * 8, events, strict=True)
            ]

        expected = [call.result(AT_MOST_S) for call, _ in start(LONG)]
        streams = start(LONG)
        for _, begun in streams:
            assert begun.wait(AT_MOST_S)
        kill(up.pid, "decode")
        wait_for(log, "no watch of decode worker", 2)
        late = start(SHORT)
        wait_for(log, " joined", 4 + 2)
        kill(up.pid, "prefill")
        wait_for(log, "no watch of prefill worker", 2)
        late += start(SHORT)
        assert [call.result(AT_MOST_S) for call, _ in streams] == expected
        assert [call.result(AT_MOST_S) for call, _ in late] == [tokens[:SHORT] for tokens in expected] * 2
