"""The engine over `baton.model`: one forward pass a chunk, one a step.

The batch's rows are dense, and what a step needs of them lies in tensors that only change where the batch
did: the page tables grow by the pages that a handle has gained, and the sampler keeps its own rows. A
step's position in each sequence is that of its last token, whose KV it computes; if a step raises, no
sequence has moved and the same step may run again.

What the model raises (out of memory, a kernel's complaint) becomes EngineError; what `on_layer` raises
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from baton.engine.contract import ChunkResult, EngineSpec
from baton.engine.paged import PagedEngine, Row
from baton.engine.torch_memory import TorchMemory
from baton.errors import BatonError, EngineError
from baton.model.attention import AttentionBatch, KvCache, select
from baton.model.load import LoadedModel
from baton.model.sampler import SamplerBatch, token_infos
from baton.request import SequenceState, TokenInfo

_LOGITS_AT_ONCE = 1 << 24
"""Elements of the logits computed together for prompt log-probabilities: 64 MiB of float32."""


class TorchEngine(PagedEngine):
    """See the module's text; made by `baton.engine.factory.build`."""

    def __init__(self, model: LoadedModel, kv: KvCache, spec: EngineSpec, host_kv_memory: int) -> None:
        super().__init__(spec, TorchMemory(kv), host_kv_memory)
        self._decoder = model.decoder
        self._device = model.device
        self._kv = kv
        # A backend that can't be loaded fails now, not in the first request.
        select(model.device, model.dtype, kv.dtype, kv.page_size, kv.head_dim)
        width = spec.pages_for(spec.max_model_len)
        self._tables = torch.zeros(max(1, spec.slots), width, dtype=torch.int32, device=model.device)
        self._filled: list[int] = []
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
            try:
                on_layer(layer)
            except BaseException as error:
                from_caller.append(error)
                raise

        with _as_engine_errors(from_caller):
            hidden = self._decoder.forward(ids, batch.positions, batch, self._kv, finished)
            tokens = self._sample_first(hidden[-1:], sample) if sample else []
            successors = token_ids[start + 1 : end + 1]
            prompt = [] if prompt_logprobs is None else self._score(hidden, successors, prompt_logprobs, finished)
        return ChunkResult(tuple(tokens), tuple(prompt))

    def _decode(self, rows: Sequence[Row]) -> list[TokenInfo]:
        widest = self._fill_tables(rows)
        contexts = [row.position + 1 for row in rows]
        last = [row.output_ids[-1] if row.output_ids else row.state.prompt_ids[-1] for row in rows]
        with _as_engine_errors():
            batch = AttentionBatch.build(
                [1] * len(rows), contexts, self._tables[: len(rows), :widest], self.spec.page_size
            )
            ids = self._tensor(last, torch.int64)
            hidden = self._decoder.forward(ids, batch.positions, batch, self._kv)
            infos = self._sampler.sample(self._decoder.logits(hidden))
        self._sampler.accept([info.token_id for info in infos])
        return infos

    def _joined(self, row: Row) -> None:
        self._sampler.add(row.handle.owner, row.state)
        self._filled.append(0)

    def _left(self, index: int) -> None:
        last = len(self._filled) - 1
        filled = self._filled.pop()
        if index < last:
            self._filled[index] = filled
            self._tables[index] = self._tables[last]
        self._sampler.remove(index)

    def _fill_tables(self, rows: Sequence[Row]) -> int:
        """Enter pages that handles have gained; the width of the table that this step needs."""
        for index, row in enumerate(rows):
            filled, pages = self._filled[index], row.handle.pages
            held = min(len(pages), self._tables.shape[1])
            if held > filled:
                self._tables[index, filled:held] = self._tensor(pages[filled:held], torch.int32)
                self._filled[index] = held
        return self.spec.pages_for(max(row.position for row in rows) + 1)

    def _sample_first(self, hidden: Tensor, states: Sequence[SequenceState]) -> list[TokenInfo]:
        sampler = self._new_sampler()
        for state in states:
            sampler.add(f"choice {state.choice_index}", state)
        logits = self._decoder.logits(hidden)
        return sampler.sample(logits.repeat(len(states), 1))

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
        return torch.tensor(values, dtype=dtype, device=self._device)


@contextmanager
def _as_engine_errors(passing: Sequence[BaseException] = ()) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, BatonError) or error in passing:
            raise
        raise EngineError(f"the model failed: {type(error).__name__}: {error}") from error
