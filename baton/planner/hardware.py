"""Hardware: rates and sizes of one device, each row with its source.

All rates are peaks of dense arithmetic. Data sheets often print twice as much, "with sparsity", which needs a model
whose weights are half zeros. Memory is what is installed; a driver keeps one or two percent of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from baton.errors import ConfigError, preview

WIDTHS = (16, 8, 4)
"""Bits of a weight for which there are rates."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device.

    name               as on the command line
    peak_flops_per_s   operations/s on operands of 16, 8 and 4 bits; None where the device has no such instructions
    bytes_per_s        bytes/s that it reads from its memory
    memory             bytes of its memory
    host_link          bytes/s that a copy from host memory reaches; 0 if its memory is the host's
    device_link        bytes/s that it sends over the fast link: both ways along an axis of a torus, or through a switch
    axes               axes of the torus; 0 with a switch
    fast_link_devices  number of devices on the fast link; 1 if there is none
    source             document of the rates, or how they were measured
    """

    name: str
    peak_flops_per_s: tuple[float, float | None, float | None]
    bytes_per_s: float
    memory: int
    host_link: float
    device_link: float
    axes: int
    fast_link_devices: int
    source: str

    def flops_per_s(self, bits: int) -> float:
        """Operations a second on operands of `bits`, or of the next wider width that the device computes with.

        More than 16 bits count as 16: there is no row for float32.
        """
        for width, rate in reversed([*zip(WIDTHS, self.peak_flops_per_s, strict=True)]):
            if rate is not None and width >= bits:
                return rate
        return self.peak_flops_per_s[0]

    @property
    def flops_per_byte(self) -> float:
        """Ridge of the roofline: 16-bit FLOP/s over the memory's bytes/s.

        Work with fewer FLOP for each byte is bound by memory.
        """
        return self.peak_flops_per_s[0] / self.bytes_per_s


# The numbers of each document as it prints them. With sparsity they are twice the dense rates of the rows.
_BOOK = (
    'How to Scale Your Model, TPUs and Inference (jax-ml.github.io/scaling-book): "1.97e14" bf16, "3.94e14" int8, '
    '"8.2e11" bytes/s, "16GB", "9e10" bytes/s both ways along an axis'
)
_A100 = (
    'NVIDIA A100 80GB SXM data sheet: "312 TFLOPS" bf16, "624 TOPS" int8, "2,039GB/s", NVLink "600GB/s" both ways; '
    'NVIDIA A100 architecture white paper: "1248" INT4 TOPS'
)
_H100 = (
    'NVIDIA H100 architecture white paper, SXM5: "989.4" dense BF16 TFLOPS, "1978.9" dense INT8 TOPS; '
    'NVIDIA H100 SXM data sheet: "3.35TB/s", "80GB", NVLink "900GB/s" both ways'
)
_H200 = (
    'NVIDIA H200 SXM data sheet: "1,979 TFLOPS" BF16 and "3,958 TFLOPS" INT8 with sparsity, as an H100, whose dense '
    'rates are printed with a digit more; "141GB", "4.8TB/s", NVLink "900GB/s" both ways'
)
_B200 = (
    'NVIDIA HGX B200 data sheet, a GPU: "4.5 PFLOPS" BF16, "9 POPS" INT8, "18 PFLOPS" FP4, all with sparsity, "180GB", '
    'NVLink "1.8TB/s" both ways; NVIDIA DGX B200 data sheet, eight GPUs: "64TB/s"'
)
_ADA = (
    'NVIDIA Ada GPU architecture white paper, appendix A, RTX 4090: "82.6" FP16 TFLOPS, dense tensor "165.2" with FP32 '
    'accumulate, "660.6" INT8, "1321.2" INT4; "1008 GB/sec", "24 GB"'
)
_EPYC = (
    'AMD EPYC 9654 data sheet: "96" cores, "2.4GHz", "12" channels of DDR5 "4800", "460.8 GB/s", here with 64 GiB '
    "a channel; computed with 64 bf16 and 128 int8 operations a core and cycle (two paths of 256 bits)"
)
_GIB = 1 << 30

_ROWS = (
    # name, operations/s in 16, 8, 4 bits, bytes/s, memory, host link, device link, axes, devices, source
    Hardware("v5e", (1.97e14, 3.94e14, None), 8.2e11, 16 * _GIB, 1.5e10, 9e10, 2, 256, _BOOK),
    Hardware("a100", (312e12, 624e12, 1248e12), 2.039e12, 80 * _GIB, 25e9, 300e9, 0, 8, _A100),
    Hardware("h100", (989.4e12, 1978.9e12, None), 3.35e12, 80 * _GIB, 55e9, 450e9, 0, 8, _H100),
    Hardware("h200", (989.4e12, 1978.9e12, None), 4.8e12, 141 * _GIB, 55e9, 450e9, 0, 8, _H200),
    Hardware("b200", (2.25e15, 4.5e15, 9e15), 8e12, 180 * _GIB, 55e9, 900e9, 0, 8, _B200),
    Hardware("4090", (165.2e12, 660.6e12, 1321.2e12), 1.008e12, 24 * _GIB, 25e9, 25e9, 0, 1, _ADA),
    Hardware("4090-no-tensor", (82.6e12, None, None), 1.008e12, 24 * _GIB, 25e9, 25e9, 0, 1, _ADA),
    Hardware("epyc-9654", (14.7456e12, 29.4912e12, None), 460.8e9, 768 * _GIB, 0.0, 25e9, 0, 1, _EPYC),
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType({row.name: row for row in _ROWS})
"""Known hardware by name. Host links are those of pinned copies over PCIe 4 (25e9) and 5 (55e9), or the book's."""


def hardware_named(name: str) -> Hardware:
    """The row of a name, in small or capital letters, or that of a file FILE.json.

    Raises ConfigError with the names that exist, or the field of the file that can't be used.
    """
    if name.endswith(".json"):
        return _of_file(Path(name))
    if (row := HARDWARE.get(name.lower())) is None:
        raise ConfigError(f"hardware: unknown {name!r}; known: {', '.join(HARDWARE)}, and a FILE.json")
    return row


_OPTIONAL = {"host_link": 0.0, "device_link": 25e9, "axes": 0, "fast_link_devices": 1}
"""Values of fields that a file leaves out: a network of 25e9 bytes/s and no fast link."""


def _of_file(path: Path) -> Hardware:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"hardware: {str(path)!r} can't be read: {error}") from None
    needed = {"peak_flops_per_s", "bytes_per_s", "memory"}
    if not isinstance(raw, dict) or not needed <= raw.keys() <= {*needed, *_OPTIONAL, "source"}:
        known = ", ".join((*sorted(needed), *_OPTIONAL, "source"))
        raise ConfigError(f"hardware: {str(path)!r} must be an object of {known}; the first three are needed")
    rates = raw.pop("peak_flops_per_s")
    if not isinstance(rates, list) or len(rates) != len(WIDTHS) or rates[0] is None:
        raise ConfigError(
            f"hardware: peak_flops_per_s must list operations/s in 16, 8 and 4 bits, got {preview(rates)}"
        )
    row = _OPTIONAL | {name: value for name, value in raw.items() if name != "source"}
    for name, value in (*row.items(), *(("peak_flops_per_s", rate) for rate in rates if rate is not None)):
        whole, least = name in ("memory", "axes", "fast_link_devices"), int(name not in ("host_link", "axes"))
        if type(value) not in ((int,) if whole else (int, float)) or value < least:
            kind = "an integer" if whole else "a number"
            raise ConfigError(f"hardware: {name} must be {kind} of at least {least}, got {value!r}")
    return Hardware(path.stem, tuple(rates), source=str(raw.get("source", path)), **row)
