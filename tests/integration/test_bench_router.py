"""`baton bench router`, small: real processes, and what it counts."""

import json
import sys
from pathlib import Path
from subprocess import run

import pytest

from baton.bench.router import added


def test_all_runs_are_told(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    small = ["--streams=2", "--burst-streams=4", "--step-ms=20", "--seconds=0.5", "--rounds=1", f"--json={file}"]
    done = run([sys.executable, "-m", "baton", "bench", "router", *small], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    few, slow, burst = found["few"], found["slow_client"], found["burst"]
    assert 0 < few["direct_ms"]["p50"] <= few["direct_ms"]["p99"]
    assert few["through_ms"]["p50"] > 0
    for share in ("p50", "p99", "p100"):
        assert few["added_ms"][share] == pytest.approx(few["through_ms"][share] - few["direct_ms"]["p50"], abs=0.002)
    # It was held up, and got what was kept for it at once.
    assert slow["tokens_in_its_longest_message"] > 1
    assert burst["first_to_last_ms"]["p50"] < burst["emission_to_last_ms"]["p50"]
    assert burst["tokens_per_s"] > 0
    assert "added by the router, ms" in done.stdout


def test_what_the_router_adds_keeps_the_tail_of_its_tokens() -> None:
    """A slow token of the direct run takes nothing off a slow one of the other."""
    assert added([1.5, 2.0, 9.0], [0.5, 1.0, 8.0]) == [0.5, 1.0, 8.0]
