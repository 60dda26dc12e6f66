"""Results say what they are of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from baton.bench import results
from bench import common


def test_results_name_the_commit_that_was_measured_and_not_a_later_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(Path(common.__file__).with_name("overload.py")), "--seconds", "1"])
    monkeypatch.setattr(results, "commit", lambda: "a later one")
    common.save("found", {"p99": 1})
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["commit"] == common.RAN.report()["commit"] != "a later one"
    assert found["stolen_s"] >= 0
    assert found["command"] == "python -m bench.overload --seconds 1"
    assert found["results"] == {"p99": 1}
