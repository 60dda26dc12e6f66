"""Settings of an engine. No torch: services read them before anything heavy is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.kv.format import DTYPE_BYTES
from baton.native import KERNELS

CPU_PAGE_SIZE = 16
CUDA_PAGE_SIZE = 256
"""Default numbers of tokens in a page; the kernels of flash-attn need a multiple of 256."""

MAX_SEQUENCE_PAGES = 8192
"""Largest number of pages of a sequence on a CPU by default: the event loop waits while they are reserved or freed."""

CPU_SEGMENT_TOKENS, CUDA_SEGMENT_TOKENS = 4096, 16384
"""Default numbers of tokens in a segment. Merging the result of a segment takes the same time for any length. With 32
heads of 128 in bfloat16, a merge moves 72 KiB for each token of the chunk, and attention to 4,096 tokens takes 67
million operations. At 3 TB/s and 380 TFLOP/s the merge adds a seventh; with 16,384 tokens it adds a thirtieth."""

KV_HOMES = ("auto", "device", "host")

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def default_page_size(device: str, max_model_len: int) -> int:
    """Default tokens in a page: 256 on CUDA, on a CPU 16 * 2**n for at most MAX_SEQUENCE_PAGES a sequence."""
    if device == "cuda":
        return CUDA_PAGE_SIZE
    size = CPU_PAGE_SIZE
    while size * MAX_SEQUENCE_PAGES < max_model_len:
        size *= 2
    return size


def default_segment_tokens(device: str) -> int:
    """Default number of tokens of KV in host memory to which attention is computed at once."""
    return CUDA_SEGMENT_TOKENS if device == "cuda" else CPU_SEGMENT_TOKENS


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine. Raises ConfigError with the name of an invalid field and its value.

    model            checkpoint directory or hub name
    device           auto (CUDA if there is a device), cpu, cuda or cuda:N
    dtype            dtype of the computation: float32, bfloat16, float16, or auto (the checkpoint's)
    kv_dtype         dtype of KV, or auto (the same as `dtype`)
    kernels          kernels on a CPU: native, torch, or auto (native if the CPU has AVX2)
    max_model_len    largest number of tokens of prompt and output; 0 means the model's
    page_size        number of tokens in a page; 0 means `default_page_size`
    kv_memory        bytes of the page pool; 0 means automatic
    slots            slots of the generation batch; 0 on a prefill worker
    block_size       number of tokens in a prefix block, the same for all workers
    threads          compute threads of a rank on a CPU; 0 means torch's choice, or the cores divided by the ranks
    kv_home          memory of the pages: device, host, or auto (the device, and host memory for long sequences)
    host_memory      bytes of pages in host memory if `kv_home` is auto; 0 means automatic
    cache_memory     bytes of host memory that a prefix cache takes beside the pool
    segment_tokens   number of tokens of KV in host memory to which attention is computed at once; 0 means
                     `default_segment_tokens`
    num_kv_buffers   number of device buffers for segments
    tensor_parallel  number of ranks that share each layer
    pipeline_parallel  number of stages, each with some of the layers
    pin_threads      whether each compute thread gets a core of its own
    packed_weights   file in which the workers of a host share the weights of native kernels; "" means no sharing.
                     With several ranks: one path for each, with commas, or one to which
                     `.rank-I-of-N.stage-J-of-M` is added
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
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    pin_threads: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: must be a checkpoint directory or a hub name, got ''")
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
        for name, least in (("block_size", 1), ("num_kv_buffers", 2), ("tensor_parallel", 1), ("pipeline_parallel", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name}: must be {least} or more, got {value}")
        if self.kv_home not in KV_HOMES:
            raise ConfigError(f"kv_home: must be {', '.join(KV_HOMES)}, got {self.kv_home!r}")
        if self.host_memory and self.kv_home != "auto":
            raise ConfigError(f"host_memory: is for kv_home auto, with {self.kv_home} kv_memory sizes the pool")

    @property
    def ranks(self) -> int:
        """Number of processes that compute."""
        return self.tensor_parallel * self.pipeline_parallel
