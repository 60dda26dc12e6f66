"""Timed prefills and decode steps through the engine contract, as workers ask for them.

Prompts are random token ids, outputs greedy. A batch for decode is filled by copying the KV of one prefilled prompt
into pages of each sequence's own: speed depends on the pages of KV, not on its contents, and the prefill of 32
sequences of 1,024 tokens would take longer than the measurement.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.config import EngineConfig
from baton.engine.contract import Engine, EngineSequence, KvHandle, OnLayer, PromptChunk, compute_chunk
from baton.engine.factory import build
from baton.engine.load import LoadedModel
from baton.errors import ConfigError
from baton.kv.format import DTYPE_BYTES, PartData
from baton.model.checkpoint import resolve
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.native.decoder import NativeDecoder
from baton.native.packed import PackedWeights, weights_of
from baton.process.load_progress import LoadProgress
from baton.request import SamplingParams, SequenceState

CHUNK_TOKENS = 2048
WARM_STEPS = 2
_GREEDY = SamplingParams(max_tokens=1 << 30, temperature=0.0, ignore_eos=True, seed=0)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Points of a measurement: prompt lengths in tokens, and steps of every batch at every context.

    Raises ConfigError naming the field and the value seen.
    """

    prefill: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024)
    steps: int = 16
    rounds: int = 3
    chunk_size: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        for name in ("prefill", "batches", "contexts"):
            for value in getattr(self, name):
                if value < 1:
                    raise ConfigError(f"{name}: must be 1 or more, got {value}")
        for name in ("steps", "rounds", "chunk_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be 1 or more, got {getattr(self, name)}")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((*self.prefill, *(self._grown(context) for context in self.contexts)), default=1)

    def tokens(self, page_size: int) -> int:
        """Largest number of tokens in the pool at the same time."""

        def paged(tokens: int) -> int:
            return -(-tokens // page_size) * page_size

        batches = max(self.batches, default=0) * max((paged(self._grown(each)) for each in self.contexts), default=0)
        return max(batches, paged(self.longest))

    def _grown(self, context: int) -> int:
        return context + WARM_STEPS + self.steps + 2


def engine_for(plan: EnginePlan, config: EngineConfig) -> Engine:
    """Load the model of `config` with a pool, slots and a length as the plan needs them."""
    model = ModelConfig.from_pretrained(resolve(config.model))
    if plan.longest > model.max_position_embeddings:
        raise ConfigError(f"{plan.longest} tokens are asked for, the model has {model.max_position_embeddings}")
    page_size = config.page_size or 256
    named = [name for name in (config.kv_dtype, config.dtype) if name != "auto"]
    # A checkpoint's float16 becomes float32 on CPU, as does what it does not say.
    width = DTYPE_BYTES[named[0]] if named else 2 if model.dtype == "bfloat16" else 4
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * width
    return build(
        EngineConfig(
            model=config.model,
            device=config.device,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            kernels=config.kernels,
            page_size=config.page_size,
            threads=config.threads,
            max_model_len=plan.longest,
            slots=max(plan.batches, default=1),
            kv_memory=token_bytes * plan.tokens(page_size),
        )
    )


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16, library: CDLL | None = None
) -> LoadedModel:
    """A model of random weights, made on the device; `library` has the native kernels, if it computes with them."""
    parallel = TensorParallel()
    decoder = Decoder(config, TensorOptions(dtype, device, repacked=library is not None), parallel).eval()
    made = torch.Generator(device).manual_seed(0)
    for tensor in (*decoder.checkpoint_tensors(), decoder.head_tensor()):
        weight = torch.empty(tensor.shape, dtype=dtype, device=device)
        if "norm" in tensor.name:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 0.02, generator=made)
        tensor.load(weight)
    kernels: Decoder | NativeDecoder = decoder
    if library is not None:
        threads = torch.get_num_threads()
        weights = PackedWeights.private(weights_of(decoder, library, LoadProgress()), threads)
        kernels = NativeDecoder(config, dtype, weights, library, threads)
    return LoadedModel(Path("random"), config, kernels, "random", dtype, device, parallel, decoder.stage)


class EngineRuns:
    """Runs on one engine; each run frees what it allocates."""

    def __init__(self, engine: Engine, chunk_size: int = CHUNK_TOKENS) -> None:
        self._engine = engine
        self._chunk_size = chunk_size
        self._random = random.Random(0)
        self._contexts: dict[int, list[list[PartData]]] = {}

    def prefill(self, tokens: int) -> float:
        """Seconds from the first chunk of a prompt of `tokens` to its sampled first token."""
        prompt = self._prompt(tokens)
        handle = self._engine.reserve("bench", tokens)
        try:
            began = time.perf_counter()
            self._fill(handle, prompt)
            return time.perf_counter() - began
        finally:
            self._engine.free(handle)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Seconds of `steps` steps of `batch` sequences with `context` tokens each, after some steps to warm up."""
        with self.batch(batch, context, WARM_STEPS + steps):
            self.steps(WARM_STEPS)
            began = time.perf_counter()
            self.steps(steps)
            return time.perf_counter() - began

    def mixed(self, chunks: Sequence[int], prompt: int, *, step: bool = True, on_layer: OnLayer | None = None) -> float:
        """Seconds of a pass over chunks of `chunks` tokens and, with `step`, a step of the running batch.

        A chunk is in the middle of a prompt of `prompt` tokens; a token is sampled after the last one. With `on_layer`,
        the pass stops after each layer. Two passes warm up.
        """
        handles: list[KvHandle] = []
        work: list[PromptChunk] = []
        try:
            for tokens in chunks:
                handles.append(self._engine.reserve(f"bench/chunk/{len(handles)}", prompt))
                ids, start = self._prompt(prompt), (prompt - tokens) // 2
                sample = [SequenceState(_GREEDY, ids[: start + tokens])] if len(handles) == len(chunks) else []
                work.append(PromptChunk(handles[-1], ids, start, start + tokens, on_layer, sample))
            for _ in range(WARM_STEPS):
                self._engine.launch(work, step=step).result()
            began = time.perf_counter()
            self._engine.launch(work, step=step).result()
            return time.perf_counter() - began
        finally:
            for handle in handles:
                self._engine.free(handle)

    def steps(self, count: int) -> None:
        """Run steps, with as many in flight as the engine allows, until the tokens of the last one are known."""
        for _ in range(count):
            self._engine.launch()
        while self._engine.in_flight:
            self._engine.in_flight[0].result()

    @contextlib.contextmanager
    def batch(self, batch: int, context: int, steps: int) -> Iterator[None]:
        """A running batch of sequences of `context` tokens, with room for `steps` steps."""
        handles: list[KvHandle] = []
        try:
            filled = self._filled(context)
            for index in range(batch):
                handle = self._engine.reserve(f"bench/{index}", context + steps + 1)
                handles.append(handle)
                for layer, parts in enumerate(filled):
                    self._engine.write_kv(handle, layer, 0, 0, parts)
                self._engine.insert(EngineSequence(handle, SequenceState(_GREEDY, self._prompt(context + 1))))
            yield
        finally:
            for handle in handles:
                self._engine.free(handle)

    def _filled(self, context: int) -> list[list[PartData]]:
        """Parts of each layer of a prompt of `context` tokens."""
        if context not in self._contexts:
            kv = self._engine.spec.kv_format
            handle = self._engine.reserve("bench", context)
            try:
                self._fill(handle, self._prompt(context))
                heads = range(kv.heads)
                layers = range(kv.layers)
                self._contexts[context] = [
                    self._engine.read_kv(handle, layer, range(context), heads) for layer in layers
                ]
            finally:
                self._engine.free(handle)
        return self._contexts[context]

    def _fill(self, handle: KvHandle, prompt: Sequence[int]) -> None:
        for start in range(0, len(prompt), self._chunk_size):
            end = min(start + self._chunk_size, len(prompt))
            sample = [SequenceState(_GREEDY, prompt)] if end == len(prompt) else []
            compute_chunk(self._engine, PromptChunk(handle, prompt, start, end, _ignore, sample))

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._engine.spec.vocab_size), k=tokens)


def _ignore(layer: int) -> None:
    """Called for each layer; does nothing."""
