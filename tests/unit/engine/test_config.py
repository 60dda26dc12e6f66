"""EngineConfig, and the memory that the machine has."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import host_memory
from baton.engine.config import EngineConfig, default_page_size
from baton.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("dtype", "float64"),
        ("kv_dtype", "int8"),
        ("kernels", "oneDNN"),
        ("max_model_len", -1),
        ("page_size", -16),
        ("kv_memory", -1),
        ("slots", -1),
        ("block_size", 0),
        ("threads", -2),
    ],
)
def test_a_bad_field_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: .*got {value!r}$"):
        EngineConfig(**{"model": "m", field: value})


@pytest.mark.parametrize(
    ("device", "max_model_len", "tokens"),
    [("cpu", 2048, 16), ("cpu", 131_072, 16), ("cpu", 131_073, 32), ("cpu", 1 << 20, 128), ("cuda", 1 << 20, 256)],
)
def test_pages_are_larger_where_sequences_are_longer(device: str, max_model_len: int, tokens: int) -> None:
    assert default_page_size(device, max_model_len) == tokens


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_valid_devices_are_accepted(device: str) -> None:
    assert EngineConfig("m", device=device).device == device


def test_available_memory_is_bounded_by_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2000 kB\nMemAvailable:  1000 kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert host_memory.available() == 1000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("70000\n")
    assert host_memory.available() == 1000 * 1024
    (tmp_path / "memory.stat").write_text("anon 30000\nfile 40000\n")
    (tmp_path / "memory.max").write_text("90000\n")
    assert host_memory.available() == 20000
    (tmp_path / "memory.current").write_text("95000\n")
    assert host_memory.available() == 0
    (tmp_path / "memory.stat").write_text("anon 30000\nactive_file 10000\ninactive_file 30000\n")
    assert host_memory.available() == 35000, "file cache gives way"
    (tmp_path / "status").write_text("RssAnon:\t 500 kB\nRssFile:\t 20 kB\n")
    assert host_memory.available() == 35000 - 20 * 1024, "what is mapped does not"
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available() == 980 * 1024


def test_a_file_on_a_disk_that_is_mapped_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    # Where temporary files are on a tmpfs, they are memory that the kernel calls used by itself.
    on_disk = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    before = host_memory.available()
    with on_disk.open("rb") as file, mmap.mmap(file.fileno(), 32 << 20, prot=mmap.PROT_READ) as memory:
        assert sum(memory[:: mmap.PAGESIZE]) > 0
        assert before - host_memory.available() > 30 << 20


def test_available_memory_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert host_memory.available() > 1 << 20
