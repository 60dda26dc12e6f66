"""The count of tensors' bytes."""

import torch

from bench.tracker import Tracker


def test_a_storage_counts_once_and_until_it_is_freed() -> None:
    given = torch.zeros(1000)
    with Tracker() as tracker:
        given.add_(1)
        view = given.view(10, 100)
        assert tracker.now == 0
        made = view + 1
        rows = made[2:4]
        assert tracker.now == 4000
        del made
        assert tracker.now == 4000
        del rows
        assert tracker.now == 0
    assert tracker.peak == 4000
    assert tracker.at_peak == [("aten.add.Tensor", [10, 100], 4000 / (1 << 20))]


def test_tensors_of_lists_count() -> None:
    with torch.inference_mode(), Tracker() as tracker:
        made = torch.tensor([1.0] * 1000)
        assert tracker.now == made.nbytes == 4000


def test_each_of_several_results_counts() -> None:
    given = torch.zeros(3, 100)
    with Tracker() as tracker:
        found = given.max(dim=1)
        assert tracker.now == found.values.nbytes + found.indices.nbytes == 36
