"""Rows of hardware, against FLOP:byte ratios that are published or follow from data sheets."""

import re
from pathlib import Path

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


def test_a_file_describes_other_hardware(tmp_path: Path) -> None:
    file = tmp_path / "l40s.json"
    file.write_text('{"peak_flops_per_s": [362e12, 733e12, null], "bytes_per_s": 864e9, "memory": 51539607552}')
    row = hardware_named(str(file))
    assert (row.name, row.peak_flops_per_s, row.memory) == ("l40s", (362e12, 733e12, None), 48 << 30)
    assert (row.fast_link_devices, row.device_link, row.source) == (1, 25e9, str(file))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "can't be read"),
        ("[]", "must be an object of bytes_per_s, memory, peak_flops_per_s, host_link"),
        ('{"memory": 1}', "the first three are needed"),
        ('{"peak_flops_per_s": [1e12], "bytes_per_s": 1e9, "memory": 1}', "in 16, 8 and 4 bits, got [1000000000000.0]"),
        ('{"peak_flops_per_s": [1e12, null, "x"], "bytes_per_s": 1e9, "memory": 1}', "peak_flops_per_s must be a num"),
        ('{"peak_flops_per_s": [1e12, null, null], "bytes_per_s": 0, "memory": 1}', "bytes_per_s must be a number of"),
        ('{"peak_flops_per_s": [1e12, null, null], "bytes_per_s": 1, "memory": "80GiB"}', "memory must be an integer"),
    ],
)
def test_a_file_that_is_no_hardware_is_refused(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(words)):
        hardware_named(str(tmp_path / "x.json"))
