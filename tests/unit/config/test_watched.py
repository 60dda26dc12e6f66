"""A watched file that is replaced, spoilt, taken away and put back."""

import logging
import os
from pathlib import Path

import pytest

from baton.config.watched import WatchedFiles, watch_file
from baton.errors import ConfigError


def number(data: bytes) -> int:
    try:
        return int(data)
    except ValueError:
        raise ConfigError(f"is no number: {data!r}") from None


def replace(path: Path, data: bytes) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    os.replace(beside, path)


def test_the_last_good_contents_stay_whatever_becomes_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "number"
    path.write_bytes(b"1")
    watched = watch_file(str(path), "the_number", number)
    replace(path, b"2")
    assert watched.value() == 2
    with caplog.at_level(logging.WARNING):
        replace(path, b"two")
        assert [watched.value(), watched.value()] == [2, 2]
        path.unlink()
        assert [watched.value(), watched.value()] == [2, 2]
    spoilt, gone = (record.getMessage() for record in caplog.records)
    words = "new contents can't be used, the old ones stay in use: the_number: "
    assert spoilt.startswith(words)
    assert spoilt.endswith("number': is no number: b'two'")
    assert gone.startswith(words)
    assert gone.endswith("number' can't be read: No such file or directory")
    path.write_bytes(b"3")
    assert watched.value() == 3


def test_a_file_that_can_not_be_used_is_named_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "number"
    with pytest.raises(ConfigError, match=r"^the_number: .*can't be read"):
        watch_file(str(path), "the_number", number)
    path.write_bytes(b"one")
    with pytest.raises(ConfigError, match=r"^the_number: .*number': is no number: b'one'$"):
        watch_file(str(path), "the_number", number)


def test_several_files_are_read_together(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("one", "two")}
    for path in paths.values():
        path.write_bytes(b"a")
    watched = WatchedFiles({name: str(path) for name, path in paths.items()}, lambda one, two: one + two)
    assert watched.value() == b"aa"
    replace(paths["two"], b"b")
    assert watched.value() == b"ab"
