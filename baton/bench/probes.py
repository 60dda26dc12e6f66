"""The speed of the machine at this moment: bytes per second read from memory, and operations per second of a GEMM.

Bandwidth changes within minutes with the other load of the host, so a rate is compared with probes just before and
after it. Each probe tries several methods and returns the best, so that it is not slower than our own kernels.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.bench.engine import EnginePlan, EngineRuns, random_model
from baton.engine import huge_pages
from baton.engine.config import EngineConfig, default_page_size
from baton.engine.contract import Engine
from baton.engine.factory import assemble, kernels_for, measure_rates
from baton.model.config import ModelConfig
from baton.native.decoder import unsupported
from baton.native.packed import PackedWeight
from baton.planner.hardware import Hardware
from baton.planner.roofline import prefill_flops
from baton.planner.shape import ModelShape

BUFFER_BYTES = 1 << 29
"""Bytes that each probe of the bandwidth reads: more than the caches hold, which machines of a host may share."""
GEMM_ROWS, NATIVE_ROWS = (256, 1024), (256, 2048)
"""Rows that torch's operators and native kernels multiply."""
SQUARE = 4096
_ON_CUDA = 8
"""Factor for bytes and rows on a GPU, so that the time of a launch does not count."""
_REPEATS = 2
_COLUMNS = 4096
_STEP_ROWS, _STEPS = 128, 4
"""Rows up to which a rate is that of steps, which may wait for their weights; and number of steps that are timed."""
_PROMPT_LAYERS = 2
"""Layers of the model that computes prompts; the last one computes only K and V of most tokens."""
_PLAN = EnginePlan((NATIVE_ROWS[-1],), (_STEP_ROWS,), (1,), _STEPS)
"""The largest runs on models of random weights."""


class Probes:
    """Probes for engines of `dtype` on `device`. They keep their buffers as long as they exist.

    `shape` adds the shapes of the model to the GEMM probe, which also multiplies large square matrices. `library` has
    the native kernels, if the engine computes with them. They multiply beside torch's operators, which are slow in
    bfloat16 on some CPUs.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        library: CDLL | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        square: int = SQUARE,
    ) -> None:
        self._device = device
        self._shape, self._dtype, self._library = shape, dtype, library
        self._engines: dict[int, tuple[EngineRuns, ModelShape]] = {}
        scale = _ON_CUDA if device.type == "cuda" else 1
        self._buffer_bytes = scale * buffer_bytes
        self._reads = _reads(dtype, device, self._buffer_bytes)
        widths = [
            (shape.hidden_size, 2 * shape.intermediate_size),
            (shape.intermediate_size, shape.hidden_size),
            (square, square),
        ]
        self._products = [
            (rows, _product(scale * rows, *width, dtype, device)) for width in widths for rows in GEMM_ROWS
        ]
        if library is not None:
            self._products += [
                (rows, _native_product(library, rows, *width, dtype)) for width in widths for rows in NATIVE_ROWS
            ]

    def bandwidth(self) -> float:
        """Bytes a second: the best of summing, of a matrix by a vector, and of copying, which reads and writes."""
        return max(self._rate(each) for each in self._reads.values())

    def flops(self) -> float:
        """Floating-point operations a second: the best product of matrices in the engine's dtype."""
        return max(self._rate(each) for _, each in self._products)

    def flops_256(self) -> float:
        """Floating-point operations a second: the best product of 256 rows."""
        return max(self._rate(each) for rows, each in self._products if rows == GEMM_ROWS[0])

    def step_rates(self, rows: int) -> tuple[float, float]:
        """Rates of the engine with a model of random weights: operations/s with `rows` tokens, bytes/s with one.

        The model is that of `_similar`, and runs through the engine's contract. Up to 128 rows are a step of
        sequences of a few tokens, whose weights come from memory. More are a prompt; from 2,048 on the rate is the
        same. Keeps the models from the first call on.
        """
        rows, size = min(rows, NATIVE_ROWS[-1]), self._dtype.itemsize
        layer = ModelShape.of(_similar(self._shape, 1)).layer_weights * size
        steps, shape = self._runs(-(-self._buffer_bytes // layer))

        def seconds(rows: int) -> float:
            return steps.decode(rows, 1, _STEPS) / _STEPS

        one = seconds(1)
        bandwidth = shape.step_weights * size / one
        if rows <= _STEP_ROWS:
            # The longer of two measurements of one row would be too long.
            return 2 * rows * shape.step_weights / (one if rows == 1 else seconds(rows)), bandwidth
        prompts, shape = self._runs(_PROMPT_LAYERS)
        return prefill_flops(shape, rows) / self._best(lambda: prompts.prefill(rows)), bandwidth

    def _runs(self, layers: int) -> tuple[EngineRuns, ModelShape]:
        if layers not in self._engines:
            config = _similar(self._shape, layers)
            engine = _engine(config, self._dtype, self._device, self._library)
            self._engines[layers] = EngineRuns(engine), ModelShape.of(config)
        return self._engines[layers]

    def state(self) -> dict[str, float]:
        """The state of the machine now, in bytes and operations per second; each is the best of several tries.

        `sum` and `packed` are bytes read by a sum, and by a linear of one row that is packed for oneDNN where it has
        kernels. `flops_256` is the best product of 256 rows. Two cores of a processor may share a matrix unit at one
        time and not at another. This changes `packed` and `flops_256`, but not `sum`.
        """
        reads = {name: self._rate(each) for name, each in self._reads.items()}
        products = [(rows, self._rate(each)) for rows, each in self._products]
        return {
            "bytes_per_s": max(reads.values()),
            "flops_per_s": max(rate for _, rate in products),
            "sum_bytes_per_s": reads["sum"],
            "packed_bytes_per_s": reads["packed"],
            "flops_256_per_s": max(rate for rows, rate in products if rows == GEMM_ROWS[0]),
        }

    def _rate(self, timed: Timed) -> float:
        count, run = timed
        return count / self._best(run)

    def _best(self, run: Callable[[], object]) -> float:
        took = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            took.append(time.perf_counter() - began)
        return min(took)


def _similar(shape: ModelShape, layers: int) -> ModelConfig:
    """A model of so many layers, whose sizes are the nearest powers of two; few tokens, no experts, no windows."""
    sizes = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
    }
    rounded = {name: 1 << round(math.log2(size)) for name, size in sizes.items()}
    others = {"head_dim": shape.head_dim, "vocab_size": 2048, "max_position_embeddings": _PLAN.longest}
    return ModelConfig.from_dict(
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, **rounded, **others}
    )


def _engine(config: ModelConfig, dtype: torch.dtype, device: torch.device, library: CDLL | None) -> Engine:
    """An engine with random weights, for the runs of `_PLAN`."""
    native = None if unsupported(config, dtype, dtype) else library
    page_size = default_page_size(device.type, _PLAN.longest)
    memory = _PLAN.tokens(page_size) * ModelShape.of(config).kv_token_bytes(dtype.itemsize)
    settings = EngineConfig("random", page_size=page_size, kv_memory=memory, slots=_STEP_ROWS)
    engine = assemble(random_model(config, device, dtype, native), settings)
    if device.type == "cpu":
        # As `build` does, because products take longer with small pages.
        huge_pages.collapse()
    return engine


def this_machine(shape: ModelShape, dtype: torch.dtype) -> Callable[[int], Hardware]:
    """Rates of the first CUDA device, or of the CPU: as hardware with the rates of a step with so many rows.

    A call measures, once for each number of rows up to 2,048. The device is planned for alone, without links to others.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    probes = Probes(shape, dtype, device, library=kernels_for("auto", device).library)
    host = device.type == "cpu"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if host else torch.cuda.mem_get_info()[1]
    link = 0.0 if host else measure_rates(device, dtype)[1]

    @functools.cache
    def measured(rows: int) -> Hardware:
        flops, bandwidth = probes.step_rates(rows)
        source = f"measured with passes of {rows} tokens through a model of a similar shape, {dtype} on {device}"
        return Hardware("this", (flops, None, None), bandwidth, memory, link, 0.0, 0, 1, source)

    return lambda rows: measured(min(rows, NATIVE_ROWS[-1]))


Timed = tuple[int, Callable[[], object]]
"""Bytes or operations of one call, and the call."""


def _reads(dtype: torch.dtype, device: torch.device, size: int) -> dict[str, Timed]:
    columns = min(_COLUMNS, size // 32)
    floats = torch.ones(size // 4 // columns, columns, device=device)
    half, target = floats.view(-1).chunk(2)
    vector = torch.ones(columns, device=device)
    weight = torch.ones(size // 4 // columns, columns, dtype=dtype, device=device)
    return {
        "sum": (size, floats.view(torch.int64).sum),
        "matvec": (size, lambda: torch.mv(floats, vector)),
        "copy": (size, lambda: target.copy_(half)),
        "packed": (weight.numel() * dtype.itemsize, _linear(weight, 1)),
    }


def _product(rows: int, columns: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Timed:
    weight = torch.ones(outputs, columns, dtype=dtype, device=device)
    return 2 * rows * columns * outputs, _linear(weight, rows)


def _native_product(library: CDLL, rows: int, columns: int, outputs: int, dtype: torch.dtype) -> Timed:
    threads = torch.get_num_threads()
    packed = PackedWeight.pack(library, torch.ones(outputs, columns, dtype=dtype))
    x = torch.ones(rows, columns)
    return 2 * rows * columns * outputs, lambda: packed.multiply(x, threads=threads)


def _linear(weight: Tensor, rows: int) -> Callable[[], Tensor]:
    """The product of `[rows, columns]` with a weight `[outputs, columns]`, packed for oneDNN where that is faster."""
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not _packs():
        return lambda: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    pointwise: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    return lambda: pointwise(x, packed, None, "none", [], "")


def _packs() -> bool:
    """Whether oneDNN has bfloat16 kernels for this CPU."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
