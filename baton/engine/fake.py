"""An engine whose tokens can be computed by hand.

With prompt and output ids t[0..n) of one choice, the next token is

    (1·t[0] + 2·t[1] + … + n·t[n-1] + stage + noise) mod vocab_size

with `stage` 1 for the first output token, which prefill samples, and 2 for all later ones, which decode samples;
`noise` is 0 for greedy sampling and `seed + choice_index` otherwise. For example, greedy with the prompt [5, 7] and a
vocabulary of 1000: prefill samples 1·5 + 2·7 + 1 = 20; decode then samples 5 + 14 + 3·20 + 2 = 81, and then
5 + 14 + 60 + 4·81 + 2 = 405. The prefill of a replay, which has output ids, samples the token that decode would sample.
A log-probability is -1 from prefill, -2 from decode, and -3 for a prompt token, so a test can tell their origins.

The KV is real. The token t at position p stores, in each layer, head and part (k: 0, v: 1), its digits in
base 251

    element e = (t // 251**e + 3·p + 7·layer + 11·head + 13·part) mod 251

as numbers that are exact in every supported dtype. Decode compares the sequence's pages with the KV that its tokens
imply. If any element differs, the token is certainly another one: a transfer that loses, misplaces or changes a single
element changes the output. A sequence with an element that is not finite gets no token. No torch.
"""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from baton.engine.contract import EngineSpec, OnLayer
from baton.engine.core import EngineCore
from baton.engine.executor import InProcessExecutor
from baton.engine.plan import ForwardPlan, PlanResult, PromptInput, Row, RowResult
from baton.errors import EngineError, JoinFailed, NoToken
from baton.kv.format import DTYPE_BYTES, KvFormat, PartData, attention_parts
from baton.request import SamplingParams, SequenceState, TokenInfo

BASE = 251
PREFILL_LOGPROB, DECODE_LOGPROB, PROMPT_LOGPROB = -1.0, -2.0, -3.0


def next_token(ids: Sequence[int], stage: int, params: SamplingParams, choice_index: int, vocab_size: int) -> int:
    """The next token by the formula of this module."""
    noise = 0 if params.greedy else (params.seed or 0) + choice_index
    return (sum(i * token for i, token in enumerate(ids, 1)) + stage + noise) % vocab_size


def expected_tokens(
    prompt_ids: Sequence[int],
    count: int,
    *,
    params: SamplingParams | None = None,
    choice_index: int = 0,
    vocab_size: int = 1000,
) -> list[int]:
    """The first `count` output tokens of a choice, greedy without `params`; rules that end it are ignored."""
    params = params or SamplingParams(temperature=0.0)
    ids = list(prompt_ids)
    for index in range(count):
        ids.append(next_token(ids, 2 if index else 1, params, choice_index, vocab_size))
    return ids[len(prompt_ids) :]


@dataclass(frozen=True)
class _Layout:
    """Layout of a token's state in a page: `[layers][parts][heads][head_dim]`, tokens one after another."""

    kv_format: KvFormat
    page_size: int

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a token in one layer and part."""
        return self.kv_format.parts[0].token_bytes

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.kv_format.token_bytes

    def start(self, offset: int, layer: int, part: int, head: int) -> int:
        """Offset of a head's elements in a page."""
        row = layer * len(self.kv_format.parts) + part
        head_bytes = self.row_bytes // self.kv_format.heads
        return offset * self.token_bytes + row * self.row_bytes + head * head_bytes

    @cached_property
    def _numbers(self) -> list[bytes]:
        return [encode([float(number)], self.kv_format.parts[0].dtype) for number in range(BASE)]

    @cached_property
    def _powers(self) -> list[int]:
        return [BASE**e for e in range(self.kv_format.parts[0].shape[1])]

    @cached_property
    def _shifts(self) -> list[int]:
        """The number that each head adds to the digits at position 0, in the order of the layout."""
        return [
            7 * layer + 11 * head + 13 * part
            for layer in range(self.kv_format.layers)
            for part in range(len(self.kv_format.parts))
            for head in range(self.kv_format.heads)
        ]

    def token(self, token_id: int, position: int) -> bytes:
        """The state of a token."""
        numbers, digits = self._numbers, [token_id // power + 3 * position for power in self._powers]
        return b"".join([numbers[(digit + shift) % BASE] for shift in self._shifts for digit in digits])


class FakeMemory:
    """Pages as byte arrays; see `baton.engine.executor.KvMemory`."""

    def __init__(self, layout: _Layout, pages: int) -> None:
        self._layout = layout
        self._pages = [bytearray(layout.page_size * layout.token_bytes) for _ in range(pages)]

    def put(self, pages: Sequence[int], position: int, states: bytes, layer: int | None = None) -> None:
        """Store the states of tokens from `position` on, of all layers or of one."""
        size, layout = self._layout.token_bytes, self._layout
        low, high = 0, size
        if layer is not None:
            low, high = layout.start(0, layer, 0, 0), layout.start(0, layer + 1, 0, 0)
        for i in range(len(states) // size):
            page, offset = divmod(position + i, layout.page_size)
            at = offset * size
            self._pages[pages[page]][at + low : at + high] = states[i * size + low : i * size + high]

    def get(self, pages: Sequence[int], tokens: int) -> bytes:
        """The states of the first `tokens` tokens."""
        size, per_page = self._layout.token_bytes, self._layout.page_size
        return b"".join(
            self._pages[page][: min(per_page, tokens - i * per_page) * size]
            for i, page in enumerate(pages[: -(-tokens // per_page)])
        )

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        size = tokens * self._layout.token_bytes
        self._pages[target][:size] = self._pages[source][:size]

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        found = []
        for index, part in enumerate(self._layout.kv_format.parts):
            rows = []
            for token in tokens:
                page, offset = divmod(token, self._layout.page_size)
                low, high = (self._layout.start(offset, layer, index, head) for head in (heads.start, heads.stop))
                rows.append(self._pages[pages[page]][low:high])
            found.append(PartData(part.name, part.dtype, (len(tokens), len(heads), *part.shape[1:]), b"".join(rows)))
        return found

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        index_of = {part.name: index for index, part in enumerate(self._layout.kv_format.parts)}
        for part in parts:
            index = index_of[part.name]
            dtype = self._layout.kv_format.parts[index].dtype
            data = bytes(part.data) if part.dtype == dtype else encode(decode(part.data, part.dtype), dtype)
            tokens = part.shape[0]
            width = len(data) // tokens
            for i in range(tokens):
                page, offset = divmod(token_start + i, self._layout.page_size)
                low = self._layout.start(offset, layer, index, head_start)
                self._pages[pages[page]][low : low + width] = data[i * width : (i + 1) * width]

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        starts = range(token_start, token_start + count * block_size, block_size)
        return [
            b"".join(page[row] for page, row in self._rows(pages, range(start, start + block_size))) for start in starts
        ]

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        width = self._layout.row_bytes
        for index, payload in enumerate(payloads):
            start = token_start + index * block_size
            for i, (page, row) in enumerate(self._rows(pages, range(start, start + block_size))):
                page[row] = payload[i * width : (i + 1) * width]

    def _rows(self, pages: Sequence[int], tokens: range) -> Iterator[tuple[bytearray, slice]]:
        """The places of a block's rows, in the order of its payload."""
        layout = self._layout
        for layer in range(layout.kv_format.layers):
            for part in range(len(layout.kv_format.parts)):
                for token in tokens:
                    page, offset = divmod(token, layout.page_size)
                    low = layout.start(offset, layer, part, 0)
                    yield self._pages[pages[page]], slice(low, low + layout.row_bytes)


@dataclass(slots=True)
class _FakeSlot:
    """The state of a sequence as a device would have it: all its token ids, and the KV that follows from them."""

    state: SequenceState
    pages: list[int]
    ids: list[int]
    implied: bytearray


class FakeRunner:
    """Runner of the fake model; times as in FakeEngine."""

    def __init__(self, spec: EngineSpec, step_time: float, chunk_time: float, delay: Callable[[float], object]) -> None:
        self._spec = spec
        self._layout = _Layout(spec.kv_format, spec.page_size)
        self.memory = FakeMemory(self._layout, spec.pages)
        self._slots: dict[int, _FakeSlot] = {}
        self._step_time, self._chunk_time, self._delay = step_time, chunk_time, delay

    def work_counter(self) -> int:
        """Always 0: work within a layer is not counted."""
        return 0

    def forward(self, plan: ForwardPlan, on_layer: OnLayer | None) -> None:
        self._update(plan)
        self._compute([(row, row.source) for row in plan.rows if isinstance(row.source, PromptInput)], on_layer)
        for row in plan.rows:
            if not isinstance(row.source, PromptInput):
                slot = self._slots[row.source]
                last = self._layout.token(slot.ids[-1], row.start)
                self.memory.put(slot.pages, row.start, last)
                slot.implied[row.start * self._layout.token_bytes :] = last

    def sample(self, plan: ForwardPlan, forwarded: None) -> Callable[[], PlanResult]:
        result = PlanResult(tuple(self._sample(row) for row in plan.rows))
        steps = not all(isinstance(row.source, PromptInput) for row in plan.rows)

        def wait() -> PlanResult:
            if self._step_time and steps:
                self._delay(self._step_time)
            return result

        return wait

    def _update(self, plan: ForwardPlan) -> None:
        if plan.reset:
            self._slots = {}
        for number in plan.left:
            del self._slots[number]
        for join in plan.joined:
            ids = [*join.state.prompt_ids, *join.state.output_ids]
            try:
                implied = bytearray(self._imply(ids[:-1]))
            except Exception as error:
                raise JoinFailed(join.slot, f"{type(error).__name__}: {error}") from error
            self._slots[join.slot] = _FakeSlot(join.state, list(join.pages), ids, implied)
        for growth in plan.grew:
            self._slots[growth.slot].pages += growth.pages

    def _compute(self, prompts: Sequence[tuple[Row, PromptInput]], on_layer: OnLayer | None) -> None:
        layers = self._spec.kv_format.layers
        for layer in range(layers if prompts else 0):
            if self._chunk_time:
                self._delay(self._chunk_time / layers)
            for row, prompt in prompts:
                states = b"".join(self._layout.token(token, p) for p, token in enumerate(prompt.token_ids, row.start))
                self.memory.put(prompt.pages, row.start, states, layer)
            if on_layer is not None:
                on_layer(layer)
        if on_layer is not None and any(prompt.prompt_logprobs is not None for _, prompt in prompts):
            on_layer(layers - 1)

    def _sample(self, row: Row) -> RowResult:
        if not isinstance(row.source, PromptInput):
            return self._sample_step(self._slots[row.source])
        prompt, tokens = row.source, list[TokenInfo]()
        for state in prompt.sample:
            try:
                ids = [*state.prompt_ids, *state.output_ids]
                implied = self._imply(ids[: row.start + row.count])
                tokens.append(self._choose(state, ids, prompt.pages, implied, decoding=False))
            except Exception as error:
                return RowResult(problem=f"choice {state.choice_index}: {error}")
        logprobs = [self._info(token, PROMPT_LOGPROB, prompt.prompt_logprobs) for token in prompt.successors]
        return RowResult(tuple(tokens), tuple(logprobs))

    def _sample_step(self, slot: _FakeSlot) -> RowResult:
        try:
            info = self._choose(slot.state, slot.ids, slot.pages, slot.implied, decoding=True)
        except NoToken as error:
            slot.ids.append(0)
            return RowResult(problem=str(error))
        slot.ids.append(info.token_id)
        return RowResult((info,))

    def _imply(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._layout.token(token, position) for position, token in enumerate(ids))

    def _choose(
        self,
        state: SequenceState,
        ids: Sequence[int],
        pages: Sequence[int],
        implied: bytes | bytearray,
        decoding: bool,
    ) -> TokenInfo:
        vocab = self._spec.vocab_size
        stage = 2 if decoding or state.output_ids else 1
        token = next_token(ids, stage, state.params, state.choice_index, vocab)
        seen = self.memory.get(pages, len(implied) // self._layout.token_bytes)
        if seen != implied:
            if not all(map(math.isfinite, decode(seen, self._spec.kv_format.parts[0].dtype))):
                raise NoToken("logits are not finite")
            token = (token + 1 + zlib.crc32(seen) % (vocab - 1)) % vocab
        logprob = DECODE_LOGPROB if decoding else PREFILL_LOGPROB
        return self._info(token, logprob, state.params.logprobs)

    def _info(self, token: int, logprob: float, alternatives: int | None) -> TokenInfo:
        if alternatives is None:
            return TokenInfo(token)
        top = tuple(((token + i) % self._spec.vocab_size, logprob - i) for i in range(alternatives))
        return TokenInfo(token, logprob, top)


class FakeEngine(EngineCore):
    """Engine of the fake model.

    `step_time` and `chunk_time` are the seconds of a step and of a chunk, spent in `delay`: for a step while its result
    is waited for, for a chunk in equal parts before each layer's `on_layer`. Tests pass another `delay` to stop the
    engine at a chosen point. Other arguments are those of the spec; pages in host memory are read like all others.
    """

    memory: FakeMemory

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        eos_token_ids: frozenset[int] = frozenset(),
        page_size: int = 16,
        pages: int = 512,
        slots: int = 8,
        block_size: int = 16,
        layers: int = 2,
        heads: int = 2,
        head_dim: int = 2,
        kv_dtype: str = "float32",
        fingerprint: str = "fake",
        steps_ahead: int = 0,
        step_time: float = 0.0,
        chunk_time: float = 0.0,
        delay: Callable[[float], object] = time.sleep,
        host_pages: int = 0,
        min_overlap_chunk: int = 0,
    ) -> None:
        if not 1 < vocab_size <= BASE**head_dim:
            raise EngineError(f"vocab_size {vocab_size} can't be told apart in {head_dim} digits of base {BASE}")
        kv_format = KvFormat(attention_parts(kv_dtype, heads, head_dim), layers, block_size)
        spec = EngineSpec(
            fingerprint,
            kv_format,
            vocab_size,
            max_model_len,
            eos_token_ids,
            page_size,
            pages,
            slots,
            steps_ahead,
            host_pages,
            min_overlap_chunk,
        )
        super().__init__(spec, InProcessExecutor(FakeRunner(spec, step_time, chunk_time, delay)))


def encode(numbers: Sequence[float], dtype: str) -> bytes:
    """Encode as little-endian elements of `dtype`; bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        wide = struct.pack(f"<{len(numbers)}f", *numbers)
        return b"".join(wide[i + 2 : i + 4] for i in range(0, len(wide), 4))
    return struct.pack(f"<{len(numbers)}{'f' if dtype == 'float32' else 'e'}", *numbers)


def decode(data: bytes | memoryview, dtype: str) -> tuple[float, ...]:
    """The numbers that `encode` has encoded."""
    raw = bytes(data)
    count = len(raw) // DTYPE_BYTES[dtype]
    if dtype == "bfloat16":
        wide = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
        return struct.unpack(f"<{count}f", wide)
    return struct.unpack(f"<{count}{'f' if dtype == 'float32' else 'e'}", raw)
