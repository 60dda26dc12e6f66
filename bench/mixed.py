"""One pass over a chunk of a prompt and a step of the batch, compared with the two passes after each other.

    python -m bench.mixed CHECKPOINT [--tokens 64] [--batch 8] [--context 128] [--turns 20]

For native kernels and torch's, in bfloat16 on all cores: milliseconds of both, in turns, and the median of their ratio,
which is below 1 where a mixed pass reads weights once instead of twice. Writes bench/results/mixed.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from baton.bench.engine import EngineRuns
from baton.engine.config import EngineConfig
from baton.engine.contract import PromptChunk
from baton.engine.factory import build
from baton.model.checkpoint import resolve
from baton.request import SamplingParams, SequenceState
from bench.common import save
from bench.pairing import spread

_GREEDY = SamplingParams(max_tokens=1 << 30, temperature=0.0, ignore_eos=True, seed=0)


def measure(model: str, kernels: str, tokens: int, batch: int, context: int, turns: int) -> dict[str, Any]:
    """Milliseconds of the mixed pass and of the two passes, by turn."""
    config = EngineConfig(model, device="cpu", dtype="bfloat16", kernels=kernels, slots=batch, kv_memory=1 << 30)
    engine = build(config)
    prompt = [7 * index % engine.spec.vocab_size for index in range(tokens)]
    found: dict[str, list[float]] = {"mixed": [], "apart": []}
    with EngineRuns(engine).batch(batch, context, 2 * turns + 4):
        handle = engine.reserve("chunk", tokens)
        chunk = PromptChunk(handle, prompt, 0, tokens, sample=[SequenceState(_GREEDY, prompt)])

        def mixed() -> None:
            engine.launch([chunk]).result()

        def apart() -> None:
            engine.launch([chunk], batch=False).result()
            engine.launch().result()

        for turn in range(turns + 2):
            for name, run in (("mixed", mixed), ("apart", apart))[:: 1 if turn % 2 else -1]:
                began = time.perf_counter()
                run()
                if turn >= 2:
                    found[name].append(1e3 * (time.perf_counter() - began))
        engine.free(handle)
    engine.close()
    ratios = spread([one / other for one, other in zip(found["mixed"], found["apart"], strict=True)])
    return {f"{name}_ms": statistics.median(values) for name, values in found.items()} | {"ratio": ratios}


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("tokens", 64), ("batch", 8), ("context", 128), ("turns", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = (given.tokens, given.batch, given.context, given.turns)
    save("mixed", {kernels: measure(str(resolve(given.model)), kernels, *sizes) for kernels in ("native", "torch")})


if __name__ == "__main__":
    main()
