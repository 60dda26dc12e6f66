"""The published format of traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.bench.load.traces import Arrival, TraceError, read

GOOD = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": list(range(46, 60))}


def test_a_line_of_the_published_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | {"input_length": 14 * 512}))
    cut, full = read(path)
    # The last block of 6,955 tokens is cut, and nobody can share it.
    assert cut == Arrival(27.482, 6955, 52, tuple(range(46, 59)))
    assert full.blocks == tuple(range(46, 60))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timestamp": -1}, "line 2: timestamp: must be a number of at least 0, got -1"),
        ({"timestamp": "1"}, "line 2: timestamp: must be a number of at least 0, got '1'"),
        ({"input_length": 0}, "line 2: input_length: must be a number of at least 1, got 0"),
        ({"input_length": 1.5}, "line 2: input_length: must be a number of at least 1, got 1.5"),
        ({"output_length": None}, "line 2: output_length: must be a number of at least 0, got None"),
        ({"output_length": True}, "line 2: output_length: must be a number of at least 0, got True"),
        ({"hash_ids": 3}, "line 2: hash_ids: must be a list of integers, got 3"),
        ({"hash_ids": [1, "2"]}, "line 2: hash_ids: must be a list of integers"),
        ({"hash_ids": [1, 2]}, "line 2: hash_ids: 2 ids do not make 6955 tokens in blocks of 512"),
        ({"timestamp": float("nan")}, "line 2: timestamp: must be a number"),
    ],
)
def test_a_bad_line_is_refused_by_number_and_field(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(TraceError, match="^" + words.replace("[", r"\[")):
        list(read(path))


@pytest.mark.parametrize("line", ["{", "[1]", "7"])
def test_what_is_no_object_is_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(TraceError, match=r"^line 1: "):
        list(read(path))
