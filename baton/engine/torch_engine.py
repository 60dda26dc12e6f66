"""The engine over `baton.model`: one forward pass a chunk, one a step.

The batch's rows are dense, and what a step needs of them lies in tensors that only change where the batch
did (`baton.engine.step_inputs`); the sampler keeps its own rows. A step's position in each sequence is that
of its last token, whose KV it computes, so if a step raises the same one may run again. On CUDA a step is
queued whole, its tokens' copy to the host included, and `spec.steps_ahead` more may be queued behind it; on
CPU it is over when it was launched.

What the model raises (out of memory, a kernel's complaint) becomes EngineError; what `on_layer` raises
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from baton.engine.contract import ChunkResult, EngineSpec
from baton.engine.cuda_graphs import DecodeGraphs, padded
from baton.engine.cuda_memory import CudaMemory
from baton.engine.paged import PagedEngine
from baton.engine.step_inputs import StepInputs
from baton.engine.steps import Row
from baton.engine.torch_memory import TorchMemory
from baton.errors import BatonError, EngineError, NoToken
from baton.model.attention import AttentionBatch, KvCache, ResidentKv, select
from baton.model.attention.flash_backend import FlashAttention
from baton.model.load import LoadedModel
from baton.model.sampled import token_infos
from baton.model.sampler import SamplerBatch
from baton.model.upload import upload
from baton.request import SequenceState, TokenInfo

_LOGITS_AT_ONCE = 1 << 24
"""Elements of the logits computed together for prompt log-probabilities: 64 MiB of float32."""


class TorchEngine(PagedEngine):
    """See the module's text; made by `baton.engine.factory.build`."""

    def __init__(
        self, model: LoadedModel, kv: KvCache, spec: EngineSpec, host_kv_memory: int, resident_kv_memory: int = 0
    ) -> None:
        self._cuda = CudaMemory(kv) if model.device.type == "cuda" else None
        in_place = self._cuda is None and kv.dtype == model.dtype
        super().__init__(spec, self._cuda or TorchMemory(kv), host_kv_memory, neighbours=in_place)
        self._decoder = model.decoder
        self._device = model.device
        self._kv = kv
        # A backend that can't be loaded fails now, not in the first request.
        backend = select(model.device, model.dtype, kv.dtype, kv.page_size, kv.head_dim)
        # A sequence that has reached its length may be in one more step.
        width = spec.pages_for(spec.max_model_len + spec.steps_ahead)
        graphs = spec.slots > 0 and isinstance(backend, FlashAttention)
        rows = padded(spec.slots) if graphs else max(1, spec.slots)
        resident = ResidentKv(kv, resident_kv_memory) if resident_kv_memory and self._cuda is None else None
        scratch = min(spec.pages, kv.num_pages - 1)
        self._inputs = StepInputs(rows, width, spec.page_size, scratch, model.device, resident)
        self._graphs = DecodeGraphs(self._run, self._inputs) if graphs else None
        self._sampler = self._new_sampler()

    def _prefill(
        self,
        pages: Sequence[int],
        token_ids: Sequence[int],
        start: int,
        end: int,
        on_layer: Callable[[int], None],
        sample: Sequence[SequenceState],
        prompt_logprobs: int | None,
    ) -> ChunkResult:
        table = self._tensor([list(pages[: self.spec.pages_for(end)])], torch.int32)
        batch = AttentionBatch.build([end - start], [end], table, self.spec.page_size)
        ids = self._tensor(token_ids[start:end], torch.int64)
        from_caller: list[BaseException] = []

        def finished(layer: int) -> None:
            if self._cuda is not None:
                self._cuda.produced(layer)
            try:
                on_layer(layer)
            except BaseException as error:
                from_caller.append(error)
                raise

        with _as_engine_errors(from_caller), self._drained():
            rows = None if prompt_logprobs is not None else int(bool(sample))
            hidden = self._decoder.forward(ids, batch.positions, batch, self._kv, finished, rows)
            tokens = self._sample_first(hidden[-1:], sample) if sample else []
            successors = token_ids[start + 1 : end + 1]
            prompt = [] if prompt_logprobs is None else self._score(hidden, successors, prompt_logprobs, finished)
        return ChunkResult(tuple(tokens), tuple(prompt))

    def _launch(self, rows: Sequence[Row]) -> Callable[[], Sequence[TokenInfo | NoToken]]:
        with _as_engine_errors(), self._drained(on_error=True):
            self._inputs.fill(rows)
            sampled = self._sampler.launch(self._decoder.logits(self._forward(rows)))
            with torch.inference_mode():
                self._inputs.advance(sampled.tokens)
            self._sampler.advance()

        def wait() -> Sequence[TokenInfo | NoToken]:
            with _as_engine_errors():
                return sampled.read()

        return wait

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        """Hidden states `[n, hidden]` of the rows' last tokens."""
        width = self._inputs.width(rows)
        if self._graphs is not None and len(rows) <= self._graphs.rows:
            return self._graphs.run(len(rows), width)
        return self._run([row.position + 1 for row in rows], width)

    def _run(self, contexts: Sequence[int], width: int) -> Tensor:
        """Hidden states of the first rows; `contexts` as in `StepInputs.batch`."""
        batch = self._inputs.batch(contexts, width)
        return self._decoder.forward(self._inputs.ids[: len(contexts)], batch.positions, batch, self._kv)

    def _must_read_first(self) -> bool:
        # Penalties count tokens, on tables that the host lays out.
        return self._sampler.counts

    def _took(self, tokens: Sequence[tuple[Row, TokenInfo]]) -> None:
        if self._sampler.counts:
            found = ((self._row_of.get(row.handle), info.token_id) for row, info in tokens)
            self._sampler.count([(index, token) for index, token in found if index is not None])

    def _undone(self) -> None:
        self._inputs.clear()
        self._sampler = self._new_sampler()
        for row in self._rows:
            self._joined(row)

    def _joined(self, row: Row) -> None:
        self._sampler.add(row.handle.owner, row.state)
        self._inputs.add(row)

    def _left(self, index: int) -> None:
        self._inputs.remove(index)
        self._sampler.remove(index)

    @contextmanager
    def _drained(self, on_error: bool = False) -> Iterator[None]:
        """Wait for a CUDA device in the end, or if this raises: afterwards pages may go to other owners."""
        done = False
        try:
            yield
            done = True
        finally:
            if self._cuda is not None and not (on_error and done):
                self._cuda.drain()

    def _sample_first(self, hidden: Tensor, states: Sequence[SequenceState]) -> list[TokenInfo]:
        sampler = self._new_sampler()
        for state in states:
            sampler.add(f"choice {state.choice_index}", state)
        logits = self._decoder.logits(hidden)
        tokens = []
        for found in sampler.sample(logits.repeat(len(states), 1)):
            if isinstance(found, NoToken):
                raise found
            tokens.append(found)
        return tokens

    def _score(
        self, hidden: Tensor, successors: Sequence[int], top: int, on_layer: Callable[[int], None]
    ) -> list[TokenInfo]:
        """Each successor's log-probability, some rows of logits at a time."""
        rows = max(1, _LOGITS_AT_ONCE // self.spec.vocab_size)
        infos: list[TokenInfo] = []
        for low in range(0, len(successors), rows):
            part = successors[low : low + rows]
            logits = self._decoder.logits(hidden[low : low + len(part)])
            infos += token_infos(logits, part, [top] * len(part))
            on_layer(self.spec.kv_format.layers - 1)
        return infos

    def _new_sampler(self) -> SamplerBatch:
        return SamplerBatch(self.spec.vocab_size, self.spec.eos_token_ids, self._device)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
        return upload(values, dtype, self._device)


@contextmanager
def _as_engine_errors(passing: Sequence[BaseException] = ()) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, BatonError) or error in passing:
            raise
        raise EngineError(f"the model failed: {type(error).__name__}: {error}") from error
