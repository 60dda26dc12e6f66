"""An operator's settings of an engine. No torch: services read it before anything heavy is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.kv.format import DTYPE_BYTES
from baton.native import KERNELS

CPU_PAGE_SIZE = 16
CUDA_PAGE_SIZE = 256
"""Default page sizes; stock flash-attn kernels want a multiple of 256."""

MAX_SEQUENCE_PAGES = 8192
"""Pages of the longest sequence on a CPU: the event loop waits while they are reserved, found in the pool, or freed."""

CPU_SEGMENT_TOKENS, CUDA_SEGMENT_TOKENS = 4096, 16384
"""Default sizes of segments. The result of each segment is merged, which takes as long for a short one as for a long
one. With 32 heads of 128 in bfloat16 it moves 72 KiB for each token of the chunk, and attention to 4,096 tokens takes
67 million operations: at 3 TB/s and 380 TFLOP/s the merge adds a seventh, and a thirtieth with 16,384 tokens."""

KV_HOMES = ("auto", "device", "host")

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def default_page_size(device: str, max_model_len: int) -> int:
    """Tokens in a page: 256 on CUDA; on a CPU 16, doubled until a sequence has at most MAX_SEQUENCE_PAGES."""
    if device == "cuda":
        return CUDA_PAGE_SIZE
    size = CPU_PAGE_SIZE
    while size * MAX_SEQUENCE_PAGES < max_model_len:
        size *= 2
    return size


def default_segment_tokens(device: str) -> int:
    """Tokens of KV in host memory that attention takes at once."""
    return CUDA_SEGMENT_TOKENS if device == "cuda" else CPU_SEGMENT_TOKENS


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine. Raises ConfigError naming the field and the value seen.

    `model`: checkpoint directory or hub name. `device`: auto (CUDA if there), cpu, cuda, cuda:N. `dtype`:
    auto (the checkpoint's) or a dtype's name. `kv_dtype`: auto (the same as `dtype`). `kernels`: on CPU, native,
    torch, or auto (native on CPUs with AVX2). `max_model_len`: tokens of prompt and output together, 0 for the
    model's. `page_size`: tokens, 0 for `default_page_size`. `kv_memory`: bytes of the page pool, 0 for
    automatic. `slots`: places in the generation batch, 0 on a prefill worker. `block_size`: tokens of a prefix
    block, one for the fleet. `threads`: of torch on CPU, 0 for torch's choice. `kv_home`: device (all pages of the pool
    there), host (all in host memory), or auto (pages in host memory beside those on the device). `host_memory`:
    bytes of these with auto, 0 for automatic. `cache_memory`: bytes of host memory that a prefix cache will take beside
    the pool. `segment_tokens`: how much KV of host memory attention takes at once, in a ring of `num_kv_buffers` device
    buffers; 0 for `default_segment_tokens`. `packed_weights`: a file through which workers of a host share the weights
    of native kernels, "" for memory of its own.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kernels: str = "auto"
    max_model_len: int = 0
    page_size: int = 0
    kv_memory: int = 0
    slots: int = 0
    block_size: int = 16
    threads: int = 0
    kv_home: str = "auto"
    host_memory: int = 0
    cache_memory: int = 0
    segment_tokens: int = 0
    num_kv_buffers: int = 3
    packed_weights: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: must name a checkpoint, got ''")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device: must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        for name in ("dtype", "kv_dtype"):
            value = getattr(self, name)
            if value not in ("auto", *DTYPE_BYTES):
                raise ConfigError(f"{name}: must be auto, {', '.join(DTYPE_BYTES)}, got {value!r}")
        if self.kernels not in KERNELS:
            raise ConfigError(f"kernels: must be {', '.join(KERNELS)}, got {self.kernels!r}")
        for name in (
            "max_model_len",
            "page_size",
            "kv_memory",
            "slots",
            "threads",
            "host_memory",
            "segment_tokens",
        ):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name}: must be 0 or more, got {value}")
        for name, least in (("block_size", 1), ("num_kv_buffers", 2)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name}: must be {least} or more, got {value}")
        if self.kv_home not in KV_HOMES:
            raise ConfigError(f"kv_home: must be {', '.join(KV_HOMES)}, got {self.kv_home!r}")
        if self.host_memory and self.kv_home != "auto":
            raise ConfigError(f"host_memory: is for kv_home auto, with {self.kv_home} kv_memory sizes the pool")
