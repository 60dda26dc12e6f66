"""`baton bench router`, small: real processes, and what it counts."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from baton.bench.router import added


def test_all_runs_are_told_and_ctrl_c_keeps_the_rounds_that_are_complete(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    small = ["--streams=2", "--burst-streams=4", "--step-ms=20", "--seconds=0.5", "--rounds=2", f"--json={file}"]
    command = [sys.executable, "-m", "baton", "bench", "router", *small]
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True, process_group=0) as bench:
        try:
            assert bench.stderr is not None
            said = ""
            while "round 2" not in said.rpartition("measuring")[2]:
                said += bench.stderr.readline()
                assert bench.poll() is None, said + bench.stderr.read()
            # Once there are two, the workers listen, and would have their say about a signal.
            children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
            while len(children.read_text().split()) < 2:
                assert bench.poll() is None
                time.sleep(0.01)
            # As a terminal does, to all processes of its group.
            os.killpg(bench.pid, signal.SIGINT)
            out, err = bench.communicate(timeout=60)
        finally:
            bench.kill()
    assert (bench.returncode, err) == (130, "interrupted: the report contains what was complete by then\n")
    found = json.loads(file.read_text())
    assert (found["interrupted"], found["rounds"]) == (True, 1)
    few, slow, burst = found["few"], found["slow_client"], found["burst"]
    assert 0 < few["direct_ms"]["p50"] <= few["direct_ms"]["p99"]
    assert few["through_ms"]["p50"] > 0
    for share in ("p50", "p99", "p100"):
        assert few["added_ms"][share] == pytest.approx(few["through_ms"][share] - few["direct_ms"]["p50"], abs=0.002)
    # It was held up, and got what was kept for it at once.
    assert slow["tokens_in_its_longest_message"] > 1
    assert burst["first_to_last_ms"]["p50"] < burst["emission_to_last_ms"]["p50"]
    assert burst["tokens_per_s"] > 0
    assert "added by the router, ms" in out


def test_what_the_router_adds_keeps_the_tail_of_its_tokens() -> None:
    """A slow token of the direct run takes nothing off a slow one of the other."""
    assert added([1.5, 2.0, 9.0], [0.5, 1.0, 8.0]) == [0.5, 1.0, 8.0]
