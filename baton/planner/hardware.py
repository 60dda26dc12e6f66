"""Hardware: rates and sizes of one device, each row with its source.

All rates are peaks of dense arithmetic. Data sheets often print twice as much, "with sparsity", which needs a model
whose weights are half zeros. Memory is what is installed; a driver keeps one or two percent of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.errors import ConfigError

WIDTHS = (16, 8, 4)
"""Bits of a weight for which there are rates."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device.

    `flops`: operations a second on operands of 16, 8 and 4 bits; None where the device has no such instructions.
    `bytes_per_s`: of its memory; `memory`: bytes. `host_link`: bytes a second that a copy from host memory reaches, 0
    if memory is the host's. `device_link`: bytes a second that the device can send to others of its group, along one
    axis of a torus, or through a switch; `axes`: axes of the torus, 0 with a switch. `group`: devices that are joined
    so; 1 if only a slower network joins them.
    """

    name: str
    flops: tuple[float, float | None, float | None]
    bytes_per_s: float
    memory: int
    host_link: float
    device_link: float
    axes: int
    group: int
    source: str

    def flops_per_s(self, bits: int) -> float:
        """Operations a second on operands of `bits`, or of the next wider width that the device computes with."""
        for width, rate in reversed([*zip(WIDTHS, self.flops, strict=True)]):
            if rate is not None and width >= bits:
                return rate
        return self.flops[0]

    @property
    def flops_per_byte(self) -> float:
        """Operations in 16 bits that the device does in the time of a byte from its memory."""
        return self.flops[0] / self.bytes_per_s


_BOOK = "How to Scale Your Model, TPUs and Inference: jax-ml.github.io/scaling-book"
_A100 = "NVIDIA A100 80GB SXM data sheet (2022): nvidia.com/en-us/data-center/a100"
_H100 = "NVIDIA H100 SXM data sheet, without sparsity: nvidia.com/en-us/data-center/h100"
_H200 = "NVIDIA H200 SXM data sheet, without sparsity: nvidia.com/en-us/data-center/h200"
_B200 = "NVIDIA HGX B200 data sheet, a GPU, without sparsity: nvidia.com/en-us/data-center/hgx"
_ADA = "NVIDIA Ada GPU architecture white paper, appendix A, without sparsity"
_EPYC = (
    "AMD EPYC 9654 data sheet: 96 cores, 2.4 GHz, 12 channels of DDR5-4800, here with 64 GiB each; computed with 64 "
    "bf16 and 128 int8 operations a core and cycle (two paths of 256 bits)"
)
_GIB = 1 << 30

_ROWS = (
    # name, operations/s in 16, 8, 4 bits, bytes/s, memory, host link, device link, axes, group, source
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
    """The row of a name. Raises ConfigError with the names that exist."""
    if name not in HARDWARE:
        raise ConfigError(f"hardware: unknown {name!r}; known: {', '.join(HARDWARE)}")
    return HARDWARE[name]
