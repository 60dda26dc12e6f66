"""transformers as a runner: CHECKPOINT [--threads N]. Its forward pass and cache, in the loop that `generate` has."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
import transformers
from protocol import Command, prompt, serve
from transformers import AutoModelForCausalLM, DynamicCache

WARM_STEPS = 2


def load(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Command]]:
    """Load the model in bfloat16; commands: prefill and decode."""
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()

    def forward(ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

    def ids(tokens: int) -> torch.Tensor:
        return torch.tensor([prompt(tokens, model.config.vocab_size)])

    def prefill(tokens: int) -> dict[str, Any]:
        given, cache = ids(tokens), DynamicCache(config=model.config)
        began = time.perf_counter()
        forward(given, cache)
        return {"seconds": time.perf_counter() - began}

    def decode(batch: int, context: int, steps: int) -> dict[str, Any]:
        cache = DynamicCache(config=model.config)
        last = forward(ids(context), cache).repeat(batch)
        # Each sequence has a copy of its own, as if each had been prefilled.
        cache.batch_repeat_interleave(batch)
        began = 0.0
        for step in range(WARM_STEPS + steps):
            if step == WARM_STEPS:
                began = time.perf_counter()
            last = forward(last[:, None], cache)
        return {"seconds": time.perf_counter() - began}

    return {"version": transformers.__version__, "torch": torch.__version__}, {"prefill": prefill, "decode": decode}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    serve(partial(load, parser.parse_args()))
