"""Rows of hardware, against FLOP:byte ratios that are published or follow from data sheets."""

import pytest

from baton.errors import ConfigError
from baton.planner.hardware import HARDWARE, hardware_named


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("v5e", 240.24), ("h100", 295.3), ("h200", 206.1), ("a100", 153.0), ("4090-no-tensor", 81.9), ("4090", 163.9)],
)
def test_operations_for_a_byte(name: str, ratio: float) -> None:
    """C / W, dense bf16; v5e: "How to Scale Your Model", chapter Inference (8.2e11 B/s); others: data sheets."""
    assert HARDWARE[name].flops_per_byte == pytest.approx(ratio, abs=5e-3 if name == "v5e" else 0.05)


def test_every_row_quotes_its_source_and_has_sane_rates() -> None:
    for name, row in HARDWARE.items():
        assert name == row.name
        assert row.source.count('"') >= 6, "numbers as the document prints them"
        rates = [rate for rate in row.peak_flops_per_s if rate is not None]
        assert rates == sorted(rates)
        assert row.bytes_per_s > row.device_link
        assert row.fast_link_devices >= 1


def test_rates_of_a_cpu_follow_from_its_cores_and_channels() -> None:
    """Cores * Hz * operations a cycle; channels * transfers a second * 8 bytes."""
    row = HARDWARE["epyc-9654"]
    assert row.peak_flops_per_s[:2] == (96 * 2.4e9 * 64, 96 * 2.4e9 * 128)
    assert row.bytes_per_s == 12 * 4800e6 * 8


def test_bits_without_instructions_take_the_next_wider_ones() -> None:
    assert HARDWARE["b200"].flops_per_s(4) == 9e15
    assert HARDWARE["h100"].flops_per_s(4) == 1978.9e12
    assert HARDWARE["h100"].flops_per_s(6) == 1978.9e12
    assert HARDWARE["4090-no-tensor"].flops_per_s(4) == 82.6e12
    assert HARDWARE["b200"].flops_per_s(32) == 2.25e15


def test_the_error_for_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="hardware: unknown 'h300'; known: v5e, a100, h100"):
        hardware_named("h300")
