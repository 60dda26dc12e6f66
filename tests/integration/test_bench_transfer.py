"""`baton bench transfer` with two real processes: what it reports, and that it compares what arrived."""

from __future__ import annotations

import itertools
import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from baton.bench import transfer
from baton.bench.transfer_ends import SHAPES
from baton.cli.main import main


def test_the_report_has_rates_and_cpu_of_both_and_ctrl_c_keeps_what_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = next(iter(SHAPES))
    fetches = itertools.count(1)
    fetch = transfer.Pair.fetch

    def interrupted(pair: transfer.Pair, streams: int) -> dict[str, Any]:
        # The last one: after one to check what arrives, two of one stream, and one of two.
        if next(fetches) == 5:
            signal.raise_signal(signal.SIGINT)
        return fetch(pair, streams)

    monkeypatch.setattr(transfer.Pair, "fetch", interrupted)
    monkeypatch.setattr(transfer, "measure", partial(transfer.measure, (shape,)))
    file = tmp_path / "report.json"
    flags = ["--tokens", "130", "--streams", "1", "--streams", "2", "--repeats", "2", "--json", str(file)]
    result = CliRunner().invoke(main, ["bench", "transfer", *flags])
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr
    assert shape in result.stdout
    report = json.loads(file.read_text())
    assert report["interrupted"]
    assert report["machine"]["cores"]
    found = report["shapes"][shape]
    assert found["bytes_a_stream"] == 130 * 24 * 2 * 2 * 64 * 2
    assert {count: len(run["ratios"]) for count, run in found["streams"].items()} == {"1": 2, "2": 1}
    for run in found["streams"].values():
        for kind in ("fetch_kv", "raw_tcp"):
            assert run[kind]["gb_per_s"] > 0
            assert run[kind]["sender_cpu_s_per_gb"] >= 0
            assert run[kind]["receiver_cpu_s_per_gb"] >= 0
