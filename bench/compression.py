"""What compressed KV costs in accuracy, and saves in bytes: real KV of a model, and greedy continuations from it.

The errors are those of KV that prefill has computed for the prompts, encoded and expanded again: of each element,
relative to the largest magnitude of its row (one head of k or v of one token), and of all together (the norm of the
differences over the norm of the KV). Then the same prompts are continued greedily by whole fleets in this process whose
decode workers ask for KV in each encoding: how many requests differ from those of uncompressed KV. "again" is
uncompressed KV once more: in bfloat16 the last bits of logits depend on the batch, so that some differ anyway.
Bytes are those that decode received; uncompressed, it need not fetch the few blocks that prompts have in common.

    python -m bench.compression [--model DIR] [--requests 64] [--tokens 64] [--concurrency 32]
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import torch
from prometheus_client import REGISTRY

from baton.engine.config import EngineConfig
from baton.engine.factory import build
from baton.engine.torch_memory import DTYPES as TORCH_DTYPES
from baton.kv.format import KvCompression, PartData
from baton.transfer.compression import compress, expand
from bench.common import save
from bench.divergence import MODES, compare, flags, model_of, outputs, prompts
from tests.fleet import Fleet

DTYPES = ("float32", "bfloat16")
ENCODINGS = (KvCompression.INT8, KvCompression.FP8)
MEMORY = 256 << 20


def errors(config: EngineConfig, asked: list[list[int]]) -> dict[str, dict[str, float]]:
    """The errors of each encoding over the KV of all prompts."""
    engine = build(config)
    kv_format = engine.spec.kv_format
    sums: dict[KvCompression, list[torch.Tensor]] = {encoding: [] for encoding in ENCODINGS}
    for ids in asked:
        handle = engine.reserve("errors", len(ids))
        engine.prefill_chunk(handle, ids, 0, len(ids), on_layer=lambda layer: None)
        for layer in range(kv_format.layers):
            parts = engine.read_kv(handle, layer, range(len(ids)), range(kv_format.heads))
            for encoding in ENCODINGS:
                found = expand(compress(parts, encoding), kv_format, encoding)
                sums[encoding] += [_sums(sent, back) for sent, back in zip(parts, found, strict=True)]
        engine.free(handle)
    return {encoding.value: _summary(torch.stack(each)) for encoding, each in sums.items()}


def _rows(part: PartData) -> torch.Tensor:
    return torch.frombuffer(part.data, dtype=TORCH_DTYPES[part.dtype]).view(*part.shape).double()


def _sums(sent: PartData, back: PartData) -> torch.Tensor:
    """Largest and summed relative difference, elements, and the squares of the differences and of what was sent."""
    before, difference = _rows(sent), _rows(back) - _rows(sent)
    relative = difference.abs() / before.abs().amax(-1, keepdim=True)
    elements = torch.tensor(float(before.numel()), dtype=torch.float64)
    return torch.stack([relative.max(), relative.sum(), elements, difference.square().sum(), before.square().sum()])


def _summary(sums: torch.Tensor) -> dict[str, float]:
    total = sums.sum(0)
    return {
        "max_relative_error": round(float(sums[:, 0].max()), 6),
        "mean_relative_error": round(float(total[1] / total[2]), 6),
        "relative_error_of_norm": round(float((total[3] / total[4]).sqrt()), 6),
    }


async def measure(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Errors, bytes and differing requests in one element type."""
    model = model_of(arguments)
    results: dict[str, Any] = {}
    async with Fleet(model, dtype=dtype, kv_memory=MEMORY, threads=0) as fleet:
        prefill = await fleet.prefill()
        expected: list[list[int]] = []
        for name in ("none", "again", *ENCODINGS):
            compression = name if name in ENCODINGS else "none"
            decode = await fleet.decode(kv_compression=compression, slots=arguments.concurrency)
            app = await fleet.start_router([prefill], [decode])
            asked = await prompts(app.address, arguments.requests, arguments.seed)
            before = _received()
            found = await outputs(app.address, asked, MODES["greedy"], arguments.tokens, arguments.concurrency)
            expected = expected or found
            results[str(name)] = {"bytes": int(_received() - before), **compare(expected, found)}
    tokens = sum(map(len, asked))
    for each in results.values():
        each["bytes_per_token"] = each.pop("bytes") // tokens
        each["share_of_bytes"] = round(each["bytes_per_token"] / results["none"].get("bytes_per_token", 1), 4)
    own = errors(EngineConfig(model=str(model), dtype=dtype, kv_memory=MEMORY), asked)
    return {name: {**each, **own.get(name, {})} for name, each in results.items()}


def _received() -> float:
    return REGISTRY.get_sample_value("baton_transfer_bytes_total", {"direction": "received"}) or 0.0


def main() -> None:
    arguments = flags(__doc__).parse_args()
    save("transfer-compression", {dtype: asyncio.run(measure(arguments, dtype)) for dtype in DTYPES})


if __name__ == "__main__":
    main()
