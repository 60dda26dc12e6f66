"""Rows added to small batches: when, how many, and that they are zeros. What they leave unchanged: test_parity.py."""

from __future__ import annotations

import pytest
import torch

from baton.model import padding
from baton.model.linear import DenseStorage, PackedStorage, TensorOptions
from baton.model.padding import RowPadding, choose, pad_to


@pytest.mark.parametrize(
    ("seconds", "targets"),
    [
        ([1.0, 1.4, 1.0, 1.3], [0, 48, 0, 0]),
        ([1.0, 1.05, 1.0, 1.1], [0, 0, 0, 0]),
        ([4.0, 3.0, 2.0, 1.0], [64, 64, 64, 0]),
        ([1.0, 2.0, 3.0, 4.0], [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_rows_are_added_where_they_save_time(seconds: list[float], targets: list[int]) -> None:
    assert choose(seconds) == targets


def test_a_batch_within_a_band_is_padded() -> None:
    found = RowPadding([0, 48, 0, 0])
    assert [found.rows(count) for count in (1, 16, 17, 32, 33, 48, 65, 500)] == [1, 16, 48, 48, 33, 48, 65, 500]
    x = torch.randn(20, 3)
    padded = found.pad(x)
    assert torch.equal(padded[:20], x)
    assert padded.shape == (48, 3)
    assert not padded[20:].any()
    assert found.pad(x[:7]).shape == (7, 3)


def test_nothing_is_copied_that_has_its_rows() -> None:
    x = torch.randn(20, 3)
    assert pad_to(x, 20) is x
    assert RowPadding().pad(x) is x


def storage() -> PackedStorage:
    dense = DenseStorage(64, 32, False, TensorOptions(torch.float32, torch.device("cpu")))
    packed = dense.process_weights_after_loading()
    assert isinstance(packed, PackedStorage)
    return packed


def test_only_weights_in_tiles_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def seconds(weights: list[PackedStorage]) -> list[float]:
        asked.append(len(weights))
        return [1.0, 2.0, 1.0, 2.0]

    monkeypatch.setattr(padding, "_seconds", seconds)
    plain, tiled = storage(), storage()
    assert RowPadding.measured([plain]).rows(20) == 20
    monkeypatch.setattr(PackedStorage, "tiled", property(lambda self: self is tiled))
    assert RowPadding.measured([plain, tiled, tiled]).rows(20) == 48
    assert asked == [2]


def test_every_number_of_bands_is_timed() -> None:
    took = padding._seconds([storage()] * 3)
    assert len(took) == padding._BANDS
    assert min(took) > 0
