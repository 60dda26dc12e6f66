"""llama.cpp as a runner, through its C API: GGUF [--threads N].

`interference` schedules as its server does: every call of llama_decode takes one token of each running sequence and
fills the rest of a batch of 2,048 with tokens of the prompt that waits (computed 512 at a time, both the defaults).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import llama_cpp as lib
from protocol import Command, prompt, serve

BATCH_TOKENS, UBATCH_TOKENS = 2048, 512
MAX_CONTEXT, SEQUENCES, SEQUENCE_TOKENS = 8192 + 64, 32, 1024 + 128
WARM_STEPS = 2
Item = tuple[int, int, int, bool]
"""Token, position, sequence, whether its logits are wanted."""


class Context:
    """A context of `sequences` sequences, each with memory of its own for `tokens` tokens."""

    def __init__(self, model: Any, threads: int, sequences: int, tokens: int) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = sequences * tokens, BATCH_TOKENS, UBATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.kv_unified = sequences, False
        self._context = lib.llama_init_from_model(model, params)
        self._memory = lib.llama_get_memory(self._context)

    def forward(self, items: Iterable[Item]) -> None:
        """One call of llama_decode."""
        given = list(items)
        batch = lib.llama_batch_init(len(given), 0, 1)
        batch.n_tokens = len(given)
        for index, (token, position, sequence, logits) in enumerate(given):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = sequence, logits
        code = lib.llama_decode(self._context, batch)
        lib.llama_synchronize(self._context)
        lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def clear(self) -> None:
        """Forget all sequences."""
        lib.llama_memory_clear(self._memory, True)

    def forget(self, sequence: int, start: int = 0) -> None:
        """Forget a sequence from a position on."""
        lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def copy(self, sequence: int) -> None:
        """Give a sequence a copy of sequence 0."""
        lib.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def prefill(self, tokens: int, sequence: int = 0) -> None:
        """A prompt, in batches."""
        items = prompt_items(tokens, sequence)
        for start in range(0, tokens, BATCH_TOKENS):
            self.forward(items[start : start + BATCH_TOKENS])


def prompt_items(tokens: int, sequence: int) -> list[Item]:
    """A random prompt whose last token's logits are wanted."""
    ids = prompt(tokens)
    return [(ids[at], at, sequence, at == tokens - 1) for at in range(tokens)]


def load(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Command]]:
    """Load the file; commands: prefill, decode and interference."""
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(arguments.model.encode(), lib.llama_model_default_params())
    long = Context(model, arguments.threads, 1, MAX_CONTEXT)
    wide = Context(model, arguments.threads, SEQUENCES, SEQUENCE_TOKENS)
    filled: list[int] = []

    def prefill(tokens: int) -> dict[str, Any]:
        long.clear()
        began = time.perf_counter()
        long.prefill(tokens)
        return {"seconds": time.perf_counter() - began}

    def decode(batch: int, context: int, steps: int) -> dict[str, Any]:
        if filled != [context]:
            wide.clear()
            wide.prefill(context)
            for sequence in range(1, SEQUENCES):
                wide.copy(sequence)
            filled[:] = [context]
        began = 0.0
        for step in range(WARM_STEPS + steps):
            if step == WARM_STEPS:
                began = time.perf_counter()
            ids = prompt(batch)
            wide.forward((ids[sequence], context + step, sequence, True) for sequence in range(batch))
        seconds = time.perf_counter() - began
        for sequence in range(batch):
            wide.forget(sequence, context)
        return {"seconds": seconds}

    def interference(**arguments_: int) -> dict[str, Any]:
        return interfere(model, arguments.threads, **arguments_)

    about = {"version": lib.__version__}
    return about, {"prefill": prefill, "decode": decode, "interference": interference}


def interfere(model: Any, threads: int, streams: int, context: int, alone: int, prompts: int, tokens: int) -> Any:
    """Milliseconds between tokens of `streams` sequences: `alone` steps without, then while `prompts` arrive."""
    both = Context(model, threads, streams + 1, tokens + UBATCH_TOKENS)
    for sequence in range(streams):
        both.prefill(context, sequence)
    position, gaps = context, dict[str, list[float]](alone=[], loaded=[])

    def step(kind: str, waiting: list[Item]) -> list[Item]:
        nonlocal position
        began = time.perf_counter()
        ids, room = prompt(streams), BATCH_TOKENS - streams
        both.forward([*((ids[each], position, each, True) for each in range(streams)), *waiting[:room]])
        gaps[kind] += [1e3 * (time.perf_counter() - began)] * streams
        position += 1
        return waiting[room:]

    for number in range(WARM_STEPS + alone):
        step("alone", [])
        if number < WARM_STEPS:
            gaps["alone"].clear()
    for _ in range(prompts):
        waiting = prompt_items(tokens, streams)
        while waiting:
            waiting = step("loaded", waiting)
        both.forget(streams)
    return gaps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    serve(partial(load, parser.parse_args()))
