"""The progress of a load: its words, and the time since the last piece."""

import logging

import pytest

from baton.process.load_progress import LoadProgress

MIB = 1 << 20


class Times:
    """A clock and a processor clock that a test moves."""

    now = used = 0.0

    def progress(self) -> LoadProgress:
        return LoadProgress("w", lambda: self.now, lambda: self.used)


def test_bytes_files_and_time_left_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    times = Times()
    progress = times.progress()
    assert str(progress) == "starting"
    progress.begin("reading the weights", 100 * MIB, {"a": 40 * MIB, "b": 60 * MIB})
    progress.place(7, "b")
    times.now = 10.0
    progress.add(40 * MIB, "a")
    progress.add(10 * MIB, address=7)
    assert str(progress) == "reading the weights: 50 of 100 MiB (50 %), 1 of 2 files (b), about 10 s left"
    progress.add(50 * MIB, address=7)
    assert [record.getMessage() for record in caplog.records] == [
        "reading the weights: a is done after 10.0 s, 1 of 2 files",
        "reading the weights: b is done after 10.0 s, 2 of 2 files",
    ]


def test_bytes_that_another_worker_had_done_before_do_not_count_for_the_time_left() -> None:
    times = Times()
    progress = times.progress()
    progress.begin("waiting for p, which packs", 100 * MIB, done=80 * MIB)
    times.now = 5.0
    progress.advance(90 * MIB)
    assert str(progress) == "waiting for p, which packs: 90 of 100 MiB (90 %), about 5 s left"


def test_a_step_with_bytes_stands_still_without_pieces_and_another_without_processor_time() -> None:
    times = Times()
    progress = times.progress()
    progress.begin("reading the weights", 100)
    times.now = times.used = 50.0
    assert progress.stalled_s() == 50.0
    progress.touch()
    assert progress.stalled_s() == 0.0
    progress.begin("making the KV pool")
    times.now, times.used = 100.0, 60.0
    assert progress.stalled_s() == 0.0
    times.now, times.used = 170.0, 60.001
    assert progress.stalled_s() == 70.0


def test_a_step_aside_has_bytes_of_its_own() -> None:
    times = Times()
    progress = times.progress()
    progress.begin("packing", 100 * MIB, {"a": 50 * MIB, "b": 50 * MIB})
    progress.add(10 * MIB, "a")
    with progress.aside("allocating", 4 * MIB):
        progress.add(3 * MIB)
        assert str(progress) == "allocating: 3 of 4 MiB (75 %)"
        times.now = 9.0
    times.now = 11.0
    progress.add(40 * MIB, "a")
    assert str(progress) == "packing: 50 of 100 MiB (50 %), 1 of 2 files (a), about 2 s left"


def test_each_piece_is_published() -> None:
    progress, seen = LoadProgress(), []
    progress.publish = lambda: seen.append((progress.moves, progress.done))
    progress.begin("reading the weights", 10)
    progress.add(4)
    progress.touch()
    assert seen == [(1, 4), (2, 4)]
