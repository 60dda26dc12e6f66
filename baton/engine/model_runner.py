"""One rank of a model: its weights, its KV memory, and the state of each slot. It does not know requests.

The sequence of a slot has a row in the tensors that steps read (`StepInputs`), and a row in the sampler. Rows have no
gaps, and change only when sequences join or leave. A step computes the KV of the newest token of each sequence. A pass
takes the tokens of prompts first, in the order of the plan, and then the tokens of the batch. On CUDA a pass is queued
whole, with the copy of its tokens to the host, and later passes may be queued behind it. On a CPU a pass is over when
`launch` returns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.contract import EngineSpec, OnLayer
from baton.engine.cuda_graphs import DecodeGraphs, padded
from baton.engine.executor import KvMemory
from baton.engine.kv_memory import CudaMemory, HostedMemory, TorchMemory
from baton.engine.load import LoadedModel
from baton.engine.pipeline import NativeStageDecoder
from baton.engine.plan import ForwardPlan, Join, PlanResult, PromptInput, Row, RowResult
from baton.errors import EngineError, JoinFailed, NoToken
from baton.model.attention import AttentionBatch, HostKv, KvCache, SegmentSource, select
from baton.model.attention.flash_backend import FlashAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.gumbel import lowest_noise
from baton.model.sampler import SamplerBatch, SamplerOutput, token_infos
from baton.model.tensors import upload
from baton.native.decoder import NativeDecoder, NativeOutput
from baton.request import TokenInfo

_LOGITS_AT_ONCE = 1 << 24
"""Largest number of logits that are computed at once for prompt log-probabilities: 64 MiB of float32."""


@dataclass(eq=False, slots=True)
class _Slot:
    """A taken slot: its row (-1 after it was left), its pages, and whether some are in host memory."""

    row: int
    pages: array[int]
    in_host: bool


@dataclass(frozen=True, slots=True)
class _PromptRow:
    """The row of a prompt, with the sampler of its states. `begin` is the index of its first token in the pass.

    `problem` says why no token can be sampled, or is empty.
    """

    row: Row
    prompt: PromptInput
    begin: int
    sampler: SamplerBatch
    problem: str = ""

    @property
    def read(self) -> list[int]:
        """Indices of the tokens of the pass whose hidden states are needed, for log-probabilities or for sampling."""
        if self.prompt.prompt_logprobs is not None:
            return list(range(self.begin, self.begin + self.row.count))
        return [self.begin + offset for offset in self.row.sampled]


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A pass before sampling.

    `states` has a row for each token after which one is sampled, prompts first, then the batch: hidden states before
    the final norm, or the results of the head of native kernels.
    """

    prompts: Sequence[_PromptRow]
    states: Tensor | NativeOutput
    prompt_logprobs: Sequence[tuple[TokenInfo, ...] | NoToken]


class ModelRunner:
    """Runner of a model in torch or in native kernels; made by `baton.engine.factory.make_runner`."""

    def __init__(self, model: LoadedModel, kv: KvCache, spec: EngineSpec, source: SegmentSource | None = None) -> None:
        """`source` brings KV from host memory to the device. Native kernels need none: they read it directly."""
        self._cuda = CudaMemory(kv) if model.device.type == "cuda" else None
        self._source = source
        self._memory: KvMemory = self._cuda or TorchMemory(kv)
        if self._cuda is not None and source is not None:
            self._memory = HostedMemory(self._cuda, kv, source)
        self._spec = spec
        self._decoder = model.decoder
        self._device = model.device
        self._kv = kv
        self._native = self._decoder if isinstance(self._decoder, NativeDecoder | NativeStageDecoder) else None
        self._samples = model.layers.stop == model.config.num_layers
        """Whether this rank has logits: those of a pipeline's earlier stages have none."""
        # A backend that can't be loaded should fail now, not in the first request.
        backend = select(model.device, model.dtype, kv.dtype, kv.page_size, kv.head_dim)
        # A sequence that has reached its length may be in one more step.
        width = spec.pages_for(spec.max_model_len + spec.steps_ahead)
        graphs = spec.slots > 0 and isinstance(backend, FlashAttention)
        rows = padded(spec.slots) if graphs else max(1, spec.slots)
        null_page = min(spec.device_pages, kv.num_pages - 1)
        self._inputs = StepInputs(rows, width, spec.page_size, null_page, model.device)
        self._graphs = DecodeGraphs(self._run, rows, width, spec.page_size, model.device) if graphs else None
        self._slots: dict[int, _Slot] = {}
        self._batch: list[_Slot] = []
        self._sampler = self._new_sampler()

    @property
    def memory(self) -> KvMemory:
        return self._memory

    def work_counter(self) -> int:
        return TorchAttention.blocks if self._native is None else self._native.work_counter()

    def forward(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> _Forwarded:
        with self._drained_on_error():
            self._update(plan)
            if self._source is not None:
                # If this pass runs within `on_layer` of a chunk, that chunk has already fetched segments of its own.
                self._source.end()
            try:
                return self._forward(plan.rows, on_layer)
            finally:
                if self._source is not None:
                    self._source.end()

    def append(self, tokens: Mapping[int, int]) -> None:
        """Append the token that another stage has sampled for each slot; it is the input of the next step."""
        with torch.inference_mode():
            for number, token in tokens.items():
                self._inputs.append_row(self._slots[number].row, token)

    def sample(self, plan: ForwardPlan, forwarded: _Forwarded) -> Callable[[], PlanResult]:
        with self._drained_on_error():
            states = forwarded.states
            if isinstance(states, NativeOutput):
                argmax, logits = states.argmax, states.logits
            else:
                argmax, logits = None, self._decoder.logits(states) if len(states) else None
            sampled, at = list[SamplerOutput | None](), 0
            for each in forwarded.prompts:
                count, end = len(each.prompt.sample), at + len(each.row.sampled)
                sampled.append(self._choose(each.sampler, argmax, logits, range(at, end), count) if count else None)
                at = end
            steps = [row for row in plan.rows if not isinstance(row.source, PromptInput)]
            choose = self._choose(self._sampler, argmax, logits, range(at, at + len(steps))) if steps else None
            wait_steps = None if choose is None else self._finish_step(steps, choose)
            done = self._cuda.mark() if self._cuda is not None and forwarded.prompts else None

        def wait() -> PlanResult:
            found = [
                _prompt_result(each, output, infos)
                for each, output, infos in zip(forwarded.prompts, sampled, forwarded.prompt_logprobs, strict=True)
            ]
            results = wait_steps() if wait_steps is not None else []
            if done is not None:
                # After this, pages of prompts may go to other owners.
                done.synchronize()
            return PlanResult((*found, *results))

        return wait

    def _update(self, plan: ForwardPlan) -> None:
        """Apply the plan's changes of slots."""
        if plan.reset:
            for slot in self._batch:
                slot.row = -1
            self._slots, self._batch = {}, []
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
        self._slots[join.slot] = slot = _Slot(len(self._batch), join.pages[:], self._in_host(join.pages))
        self._batch.append(slot)

    def _remove(self, slot: _Slot) -> None:
        """Remove a slot's row; the last row takes its place."""
        row, last = slot.row, self._batch.pop()
        if last is not slot:
            self._batch[row], last.row = last, row
        slot.row = -1
        self._inputs.remove(row)
        self._sampler.remove(row)

    def _forward(self, rows: Sequence[Row], on_layer: OnLayer | None) -> _Forwarded:
        prompts, tokens = list[_PromptRow](), 0
        for row in rows:
            if isinstance(row.source, PromptInput):
                prompts.append(self._prompt_row(row, row.source, tokens))
                tokens += row.count
        context_lens = self._context_lens(rows[len(prompts) :])
        if not prompts:
            return _Forwarded((), self._forward_step(context_lens), ())
        ids, batch = self._mixed_inputs(prompts, context_lens)
        steps = range(tokens, tokens + len(context_lens))
        read = [token for each in prompts for token in each.read] + [*steps]

        def finished(layer: int) -> None:
            if self._cuda is not None:
                self._cuda.produced(layer)
            if on_layer is not None:
                on_layer(layer)

        # On a CUDA device this is needed even without `on_layer`: reads of a layer wait for its event.
        layer_done = finished if self._cuda is not None or on_layer is not None else None
        if self._native is not None and all(each.prompt.prompt_logprobs is None for each in prompts):
            samplers = [each.sampler for each in prompts if each.prompt.sample]
            samplers += [self._sampler] if context_lens else []
            logits = not all(sampler.all_greedy for sampler in samplers)
            output = self._native.forward_head(ids, batch, self._kv, layer_done, read, logits)
            return _Forwarded(prompts, output, [()] * len(prompts))
        hidden = self._decoder.forward(ids, batch.positions, batch, self._kv, layer_done, read)
        if not self._samples:
            return _Forwarded(prompts, hidden, [()] * len(prompts))
        places = {token: place for place, token in enumerate(read)}
        infos = [self._prompt_logprobs(hidden, places, each, finished) for each in prompts]
        sampled = [places[each.begin + offset] for each in prompts for offset in each.row.sampled]
        sampled += [places[token] for token in steps]
        if len(sampled) < len(read):
            hidden = hidden[upload(sampled, torch.int64, self._device)]
        return _Forwarded(prompts, hidden, infos)

    def _context_lens(self, steps: Sequence[Row]) -> list[int]:
        """Length of each sequence of the batch, with its new token, in the order of rows; empty without a step."""
        context_lens = [0] * len(self._batch)
        for step in steps:
            if isinstance(step.source, PromptInput) or step.source not in self._slots:
                raise EngineError(f"a row of {step.source!r} is among those of slots, but has no sequence")
            if (step.count, step.sampled) != (1, (0,)):
                raise EngineError(f"slot {step.source} has {step.count} new tokens, a slot's row must have one")
            context_lens[self._slots[step.source].row] = step.positions.stop
        if steps and not all(context_lens):
            raise EngineError(f"a step must be one of all {len(context_lens)} slots that are taken, got {len(steps)}")
        return context_lens if steps else []

    def _mixed_inputs(
        self, prompts: Sequence[_PromptRow], context_lens: Sequence[int]
    ) -> tuple[Tensor, AttentionBatch]:
        """Token ids and attention batch of a pass over prompts, and over the batch if `context_lens` is not empty."""
        size, count = self._spec.page_size, len(prompts)
        tables = [each.prompt.pages for each in prompts]
        width = max(max(map(len, tables)), (max(context_lens, default=1) - 1) // size + 1)
        uploaded = [upload(table, torch.int32, self._device) for table in tables]
        table = torch.stack([F.pad(each, (0, width - len(each))) for each in uploaded])
        ids = upload([token for each in prompts for token in each.prompt.token_ids], torch.int64, self._device)
        in_host: dict[int, Sequence[int]] = {row: pages for row, pages in enumerate(tables) if self._in_host(pages)}
        if context_lens:
            steps = self._inputs.tables[: len(context_lens), :width]
            table = torch.cat([table, F.pad(steps, (0, width - steps.shape[1]))])
            ids = torch.cat([ids, self._inputs.ids[: len(context_lens)]])
            in_host |= {count + slot.row: slot.pages for slot in self._batch if slot.in_host}
        queries = [each.row.count for each in prompts] + [1] * len(context_lens)
        ends = [each.row.positions.stop for each in prompts]
        return ids, AttentionBatch.build(queries, [*ends, *context_lens], table, size, self._host_kv(in_host))

    def _forward_step(self, context_lens: Sequence[int]) -> Tensor | NativeOutput:
        """Compute a step without prompts; returns `states` of _Forwarded."""
        width = (max(context_lens) - 1) // self._spec.page_size + 1
        if self._native is not None:
            batch, logits = self._inputs.batch(context_lens, width), not self._sampler.all_greedy
            return self._native.forward_head(self._inputs.ids, batch, self._kv, None, None, logits)
        host = self._host_kv({slot.row: slot.pages for slot in self._batch if slot.in_host})
        if host is None and self._graphs is not None and len(context_lens) <= self._graphs.rows:
            return self._graphs.run(len(context_lens), width)
        return self._run(context_lens, width, host)

    def _in_host(self, pages: Sequence[int]) -> bool:
        return self._source is not None and any(page >= self._spec.device_pages for page in pages)

    def _host_kv(self, tables: Mapping[int, Sequence[int]]) -> HostKv | None:
        return None if self._source is None or not tables else HostKv(tables, self._source)

    def _run(self, context_lens: Sequence[int], width: int, host: HostKv | None = None) -> Tensor:
        """Compute the hidden states of the first rows; arguments as in `StepInputs.batch`."""
        batch = self._inputs.batch(context_lens, width, host)
        return self._decoder.forward(self._inputs.ids[: len(context_lens)], batch.positions, batch, self._kv)

    def _choose(
        self, sampler: SamplerBatch, argmax: Tensor | None, logits: Tensor | None, rows: range, copies: int = 1
    ) -> SamplerOutput:
        """Choose tokens for `rows` of the logits or of `argmax`; each row is sampled `copies` times."""
        own = slice(rows.start, rows.stop)
        if logits is not None:
            return sampler.launch(logits[own] if copies == 1 else logits[own].repeat(copies, 1))
        if argmax is None:
            raise EngineError("a token is to be sampled, but nothing was computed")
        chosen = argmax[own] if copies == 1 else argmax[own].repeat(copies)
        return SamplerOutput(chosen, [chosen >= 0])

    def _finish_step(self, steps: Sequence[Row], sampled: SamplerOutput) -> Callable[[], list[RowResult]]:
        slots = [self._slots[cast(int, step.source)] for step in steps]
        rows = [slot.row for slot in slots]
        sampler = self._sampler
        with torch.inference_mode():
            self._inputs.append(sampled.tokens)
        counts = [0] * len(steps)
        for row, step in zip(rows, steps, strict=True):
            counts[row] = len(step.sampled)
        sampler.add_outputs(counts)

        def wait() -> list[RowResult]:
            infos = sampled.read()
            found = [infos[row] for row in rows]
            if sampler.penalizes:
                # The host lays out the tables of penalties, so it must know the tokens. Meanwhile a slot may have moved
                # to another row, or have been left.
                tokens = [(slot.row, info) for slot, info in zip(slots, found, strict=True) if slot.row >= 0]
                sampler.add_token_ids([(row, info.token_id) for row, info in tokens if isinstance(info, TokenInfo)])
            return [RowResult(problem=str(each)) if isinstance(each, NoToken) else RowResult((each,)) for each in found]

        return wait

    def _prompt_logprobs(
        self, hidden: Tensor, places: Mapping[int, int], each: _PromptRow, on_layer: OnLayer
    ) -> tuple[TokenInfo, ...] | NoToken:
        """Log-probabilities of the successors of a prompt's row, computed in parts; NoToken if logits are not finite.

        `places` maps the index of a token in the pass to its row in `hidden`. `on_layer` is called after each part.
        """
        rows, prompt = max(1, _LOGITS_AT_ONCE // self._spec.vocab_size), each.prompt
        infos: list[TokenInfo] = []
        for low in range(0, len(prompt.successors), rows):
            part, first = prompt.successors[low : low + rows], places[each.begin + low]
            logits = self._decoder.logits(hidden[first : first + len(part)])
            try:
                infos += token_infos(logits, part, [prompt.prompt_logprobs or 0] * len(part))
            except NoToken as error:
                return error
            on_layer(self._spec.kv_format.layers - 1)
        return tuple(infos)

    def _prompt_row(self, row: Row, prompt: PromptInput, begin: int) -> _PromptRow:
        sampler = self._new_sampler()
        try:
            for state in prompt.sample:
                sampler.add(state)
        except Exception as error:
            # Other rows are not affected.
            problem = f"can't be sampled: {type(error).__name__}: {error}"
            return _PromptRow(replace(row, sampled=()), replace(prompt, sample=()), begin, sampler, problem)
        return _PromptRow(row, prompt, begin, sampler)

    @contextmanager
    def _drained_on_error(self) -> Iterator[None]:
        """Wait for a CUDA device if the block raises, because then the pages may go to other owners."""
        try:
            yield
        except BaseException:
            if self._cuda is not None:
                self._cuda.drain()
            raise

    def _new_sampler(self) -> SamplerBatch:
        lowest = self._native.lowest_noise if self._native is not None else lowest_noise
        return SamplerBatch(self._spec.vocab_size, self._spec.eos_token_ids, self._device, lowest)


class StepInputs:
    """Inputs of decode steps, in device tensors with a row for each sequence.

    `ids` has the newest tokens and `positions` their positions, int64 `[slots]`. `tables` has page tables, int32
    `[slots, width]`. Rows `[0, n)` are the batch. The other rows are at position 0 of the null page, which no sequence
    owns. A step over more rows than the batch has (`baton.engine.cuda_graphs`) writes to that page. Each step writes
    its tokens and the next positions into these tensors. So the next step needs nothing from the host, except the
    numbers of new pages.
    """

    def __init__(self, slots: int, width: int, page_size: int, null_page: int, device: torch.device) -> None:
        """Make tensors of `slots` rows without sequences; `null_page` is the page of these rows."""
        self.page_size = page_size
        self.ids = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.tables = torch.full((slots, width), null_page, dtype=torch.int32, device=device)
        self._null_page = null_page
        self._device = device
        self._filled: list[int] = []

    def add(self, token_id: int, position: int, pages: Sequence[int]) -> None:
        """Add a sequence as the new last row: its newest token, the position of that token, and its pages."""
        row = len(self._filled)
        entry = upload([token_id, position], torch.int64, self._device)
        self.ids[row], self.positions[row] = entry[0], entry[1]
        self._filled.append(0)
        self.extend(row, pages)

    def extend(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row; pages beyond the width of the table are never needed, and are left out."""
        begin = self._filled[row]
        end = min(begin + len(pages), self.tables.shape[1])
        if end > begin:
            self.tables[row, begin:end] = upload(pages[: end - begin], torch.int32, self._device)
            self._filled[row] = end

    def remove(self, index: int) -> None:
        """Remove a row; the last row takes its place."""
        last = len(self._filled) - 1
        filled = self._filled.pop()
        for part in (self.ids, self.positions, self.tables):
            if index < last:
                part[index] = part[last]
        if index < last:
            self._filled[index] = filled
        self.positions[last] = 0
        self.tables[last] = self._null_page

    def clear(self) -> None:
        """Remove all rows."""
        while self._filled:
            self.remove(len(self._filled) - 1)

    def batch(self, context_lens: Sequence[int], width: int, host: HostKv | None = None) -> AttentionBatch:
        """Attention batch of the first rows: `context_lens` include the new tokens; `host` has rows with host pages."""
        count = len(context_lens)
        tables = self.tables[:count, :width]
        return AttentionBatch.step(context_lens, self.positions[:count], tables, self.page_size, host)

    def append_row(self, row: int, token: int) -> None:
        """Append one token to a row."""
        self.ids[row] = token
        self.positions[row] += 1

    def append(self, tokens: Tensor) -> None:
        """Append one token to each of the first rows; `tokens` is int64 `[n]`."""
        self.ids[: len(tokens)] = tokens
        self.positions[: len(tokens)] += 1


def _prompt_result(row: _PromptRow, sampled: SamplerOutput | None, infos: tuple[TokenInfo, ...] | NoToken) -> RowResult:
    if row.problem or isinstance(infos, NoToken):
        return RowResult(problem=row.problem or str(infos))
    tokens = list[TokenInfo]()
    for state, found in zip(row.prompt.sample, sampled.read() if sampled is not None else (), strict=True):
        if isinstance(found, NoToken):
            return RowResult(problem=f"choice {state.choice_index}: {found}")
        tokens.append(found)
    return RowResult(tuple(tokens), infos)
