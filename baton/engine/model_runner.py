"""One rank: its model, its KV memory, and what it was told of each slot. It knows no request.

A slot's sequence has a row of the tensors that steps read (`baton.engine.step_inputs`) and a row of the sampler; both
are dense, and change only where the batch did. A step's position in each sequence is that of its newest token, whose KV
it computes. On CUDA a step is queued whole, its tokens' copy to the host included, and others may be queued behind it;
on CPU it is over when it was launched.

A plan is one chunk, or a step of all slots that are taken: other mixtures are refused, until attention and sampling
take rows of several kinds at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.contract import ChunkResult, EngineSpec
from baton.engine.cuda_graphs import DecodeGraphs, padded
from baton.engine.cuda_memory import CudaMemory
from baton.engine.executor import KvMemory, OnLayer
from baton.engine.hosted_memory import HostedMemory
from baton.engine.plan import Chunk, ForwardPlan, Join, PlanResult, Step
from baton.engine.step_inputs import StepInputs
from baton.engine.torch_memory import TorchMemory
from baton.errors import EngineError, JoinFailed, NoToken
from baton.model.attention import AttentionBatch, HostKv, KvCache, SegmentSource, select
from baton.model.attention.flash_backend import FlashAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.gumbel import lowest_noise
from baton.model.load import LoadedModel
from baton.model.sampler import SamplerBatch
from baton.model.sampler_output import SamplerOutput, token_infos
from baton.model.upload import upload
from baton.native.decoder import NativeDecoder, NativeStepOutput
from baton.request import SequenceState, TokenInfo

_LOGITS_AT_ONCE = 1 << 24
"""Elements of the logits computed together for prompt log-probabilities: 64 MiB of float32."""


@dataclass(eq=False, slots=True)
class _Slot:
    """A slot that is taken: its row now, -1 once it was left, and its pages if some are in host memory."""

    row: int
    pages: array[int]
    in_host: bool


@dataclass(frozen=True, slots=True)
class _HiddenStates:
    """Hidden states before the final norm: `[1, hidden]` after a chunk, `[rows, hidden]` after a step."""

    hidden: Tensor
    prompt_logprobs: tuple[TokenInfo, ...] = ()


class ModelRunner:
    """See the module's text and `baton.engine.executor.Runner`; made by `baton.engine.factory.build`."""

    def __init__(self, model: LoadedModel, kv: KvCache, spec: EngineSpec, source: SegmentSource | None = None) -> None:
        """`source` brings KV from host memory; native kernels need none, since they read all pages where they lie."""
        self._cuda = CudaMemory(kv) if model.device.type == "cuda" else None
        self._source = source
        self._memory: KvMemory = self._cuda or TorchMemory(kv)
        if self._cuda is not None and source is not None:
            self._memory = HostedMemory(self._cuda, kv, source)
        self._spec = spec
        self._decoder = model.decoder
        self._device = model.device
        self._kv = kv
        self._native = self._decoder if isinstance(self._decoder, NativeDecoder) else None
        # A backend that can't be loaded fails now, not in the first request.
        backend = select(model.device, model.dtype, kv.dtype, kv.page_size, kv.head_dim)
        # A sequence that has reached its length may be in one more step.
        width = spec.pages_for(spec.max_model_len + spec.steps_ahead)
        graphs = spec.slots > 0 and isinstance(backend, FlashAttention)
        rows = padded(spec.slots) if graphs else max(1, spec.slots)
        null_page = min(spec.device_pages, kv.num_pages - 1)
        self._inputs = StepInputs(rows, width, spec.page_size, null_page, model.device)
        self._graphs = DecodeGraphs(self._run, self._inputs) if graphs else None
        self._slots: dict[int, _Slot] = {}
        self._rows: list[_Slot] = []
        self._sampler = self._new_sampler()

    @property
    def memory(self) -> KvMemory:
        """See Runner."""
        return self._memory

    def heartbeat(self) -> int:
        """See Runner."""
        return TorchAttention.blocks if self._native is None else self._native.heartbeat()

    def forward(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> _HiddenStates | NativeStepOutput:
        """See Runner. Raises EngineError for a mixture that it does not take."""
        if len(plan.chunks) + bool(plan.steps) != 1:
            chunks, steps = len(plan.chunks), len(plan.steps)
            raise EngineError(f"a plan must be one chunk or a step of the batch, got {chunks} chunks and {steps} steps")
        with self._drained_on_error():
            self._update(plan)
            if self._source is not None:
                # What a chunk has fetched ahead, in whose `on_layer` this one runs, is of other pages.
                self._source.end()
            try:
                if plan.chunks:
                    return self._forward_chunk(plan.chunks[0], on_layer)
                return self._forward_step(plan.steps)
            finally:
                if self._source is not None:
                    self._source.end()

    def sample(self, plan: ForwardPlan, states: _HiddenStates | NativeStepOutput) -> Callable[[], PlanResult]:
        """See Runner. Raises NoToken where logits after a chunk are not finite."""
        with self._drained_on_error():
            if isinstance(states, NativeStepOutput):
                return self._finish_step(plan.steps, self._choose(states))
            if plan.chunks:
                return self._sample_chunk(plan.chunks[0], states)
            return self._finish_step(plan.steps, self._sampler.launch(self._decoder.logits(states.hidden)))

    def _update(self, plan: ForwardPlan) -> None:
        """Take what has changed since the last plan."""
        if plan.reset:
            for slot in self._rows:
                slot.row = -1
            self._slots, self._rows = {}, []
            self._inputs.clear()
            self._sampler = self._new_sampler()
        for number in plan.left:
            self._remove(self._slots.pop(number))
        for join in plan.joined:
            try:
                self._join(join)
            except Exception as error:
                raise JoinFailed(join.slot, f"{type(error).__name__}: {error}") from error
        for growth in plan.grew:
            slot = self._slots[growth.slot]
            self._inputs.extend(slot.row, growth.pages)
            slot.pages += growth.pages
            slot.in_host = slot.in_host or self._in_host(growth.pages)

    def _join(self, join: Join) -> None:
        self._sampler.add(join.state)
        last = join.state.output_ids[-1] if join.state.output_ids else join.state.prompt_ids[-1]
        self._inputs.add(last, join.state.length - 1, join.pages)
        self._slots[join.slot] = slot = _Slot(len(self._rows), join.pages[:], self._in_host(join.pages))
        self._rows.append(slot)

    def _remove(self, slot: _Slot) -> None:
        """The last row takes its place."""
        row, last = slot.row, self._rows.pop()
        if last is not slot:
            self._rows[row], last.row = last, row
        slot.row = -1
        self._inputs.remove(row)
        self._sampler.remove(row)

    def _forward_chunk(self, chunk: Chunk, on_layer: OnLayer | None) -> _HiddenStates:
        count = len(chunk.token_ids)
        table = upload(chunk.pages, torch.int32, self._device)[None]
        host = self._host_kv({0: chunk.pages} if self._in_host(chunk.pages) else {})
        batch = AttentionBatch.build([count], [chunk.start + count], table, self._spec.page_size, host)

        def finished(layer: int) -> None:
            if self._cuda is not None:
                self._cuda.produced(layer)
            if on_layer is not None:
                on_layer(layer)

        reports = chunk.prompt_logprobs is not None
        ids = upload(chunk.token_ids, torch.int64, self._device)
        wanted = None if reports else int(bool(chunk.sample))
        hidden = self._decoder.forward(ids, batch.positions, batch, self._kv, finished, wanted)
        infos = self._prompt_logprobs(hidden, chunk, finished) if reports else ()
        return _HiddenStates(hidden[-1:], infos)

    def _forward_step(self, steps: Sequence[Step]) -> _HiddenStates | NativeStepOutput:
        """Hidden states `[n, hidden]` of the rows' newest tokens; native kernels go on to logits or the largest."""
        contexts = [0] * len(self._rows)
        for step in steps:
            if step.slot not in self._slots:
                raise EngineError(f"slot {step.slot} is in a step, but has no sequence")
            contexts[self._slots[step.slot].row] = step.position + 1
        if not all(contexts):
            raise EngineError(f"a step must be one of all {len(contexts)} slots that are taken, got {len(steps)}")
        if self._native is not None:
            inputs, logits = self._inputs, not self._sampler.takes_largest
            return self._native.step(inputs.ids, contexts, inputs.tables, self._kv, logits)
        width = (max(contexts) - 1) // self._spec.page_size + 1
        host = self._host_kv({slot.row: slot.pages for slot in self._rows if slot.in_host})
        if host is None and self._graphs is not None and len(contexts) <= self._graphs.rows:
            return _HiddenStates(self._graphs.run(len(contexts), width))
        return _HiddenStates(self._run(contexts, width, host))

    def _in_host(self, pages: Sequence[int]) -> bool:
        return self._source is not None and any(page >= self._spec.device_pages for page in pages)

    def _host_kv(self, tables: Mapping[int, Sequence[int]]) -> HostKv | None:
        return None if self._source is None or not tables else HostKv(tables, self._source)

    def _run(self, contexts: Sequence[int], width: int, host: HostKv | None = None) -> Tensor:
        """Hidden states of the first rows; arguments as in `StepInputs.batch`."""
        batch = self._inputs.batch(contexts, width, host)
        return self._decoder.forward(self._inputs.ids[: len(contexts)], batch.positions, batch, self._kv)

    def _choose(self, step: NativeStepOutput) -> SamplerOutput:
        if step.logits is not None:
            return self._sampler.launch(step.logits)
        return SamplerOutput(step.best, [step.best >= 0])

    def _finish_step(self, steps: Sequence[Step], sampled: SamplerOutput) -> Callable[[], PlanResult]:
        slots = [self._slots[step.slot] for step in steps]
        rows = [slot.row for slot in slots]
        sampler = self._sampler
        with torch.inference_mode():
            self._inputs.advance(sampled.tokens)
        sampler.advance()

        def wait() -> PlanResult:
            infos = sampled.read()
            found = [infos[row] for row in rows]
            if sampler.counts:
                # Penalties count tokens, on tables that the host lays out. A slot may have moved or left meanwhile.
                tokens = [(slot.row, info) for slot, info in zip(slots, found, strict=True) if slot.row >= 0]
                sampler.count([(row, info.token_id) for row, info in tokens if isinstance(info, TokenInfo)])
            return PlanResult(steps=tuple(str(each) if isinstance(each, NoToken) else (each,) for each in found))

        return wait

    def _sample_chunk(self, chunk: Chunk, states: _HiddenStates) -> Callable[[], PlanResult]:
        tokens = self._sample_first(states.hidden, chunk.sample) if chunk.sample else ()
        result = PlanResult(chunks=(ChunkResult(tokens, states.prompt_logprobs),))

        def wait() -> PlanResult:
            # Afterwards its pages may go to other owners.
            if self._cuda is not None:
                self._cuda.drain()
            return result

        return wait

    def _sample_first(self, hidden: Tensor, states: Sequence[SequenceState]) -> tuple[TokenInfo, ...]:
        sampler = self._new_sampler()
        for state in states:
            sampler.add(state)
        logits = self._decoder.logits(hidden)
        tokens = []
        for state, found in zip(states, sampler.sample(logits.repeat(len(states), 1)), strict=True):
            if isinstance(found, NoToken):
                raise NoToken(f"choice {state.choice_index}: {found}")
            tokens.append(found)
        return tuple(tokens)

    def _prompt_logprobs(self, hidden: Tensor, chunk: Chunk, on_layer: OnLayer) -> tuple[TokenInfo, ...]:
        """Each successor's log-probability, some rows of logits at a time; `on_layer` is called after each part."""
        rows = max(1, _LOGITS_AT_ONCE // self._spec.vocab_size)
        infos: list[TokenInfo] = []
        for low in range(0, len(chunk.successors), rows):
            part = chunk.successors[low : low + rows]
            logits = self._decoder.logits(hidden[low : low + len(part)])
            infos += token_infos(logits, part, [chunk.prompt_logprobs or 0] * len(part))
            on_layer(self._spec.kv_format.layers - 1)
        return tuple(infos)

    @contextmanager
    def _drained_on_error(self) -> Iterator[None]:
        """If this raises, wait for a CUDA device: afterwards pages may go to other owners."""
        try:
            yield
        except BaseException:
            if self._cuda is not None:
                self._cuda.drain()
            raise

    def _new_sampler(self) -> SamplerBatch:
        lowest = self._native.lowest_noise if self._native is not None else lowest_noise
        return SamplerBatch(self._spec.vocab_size, self._spec.eos_token_ids, self._device, lowest)
