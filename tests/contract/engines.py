"""The engines under contract, each from a `Rig` that makes any number of equal ones with sizes of choice."""

import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.engine.contract import Engine, KvHandle
from baton.engine.core import EngineCore
from baton.engine.plan import PlanResult
from baton.kv.format import PartData
from baton.request import SamplingParams, SequenceState, TokenInfo
from tests.engine_calls import found, insert, prefill_chunk

GREEDY = SamplingParams(temperature=0.0)
MIXED = (
    GREEDY,
    SamplingParams(seed=3, temperature=0.9, top_k=12),
    SamplingParams(seed=4, temperature=1.3, top_p=0.8),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(seed=5, min_p=0.05, logit_bias=((7, 2.0), (9, -50.0))),
)
"""Settings that share a batch."""


@dataclass
class Rig:
    """`make(page_size=, pages=, slots=, kv_dtype=, max_model_len=)`; `vocab` bounds prompt ids."""

    name: str
    make: Callable[..., EngineCore]
    vocab: int
    exact: bool
    made: list[Engine] = field(default_factory=list)

    def engine(self, **sizes: Any) -> EngineCore:
        """A new engine, audited and closed by the fixture."""
        engine = self.make(**sizes)
        self.made.append(engine)
        return engine

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Reproducible token ids."""
        return [random.Random(f"{seed}/{i}").randrange(self.vocab) for i in range(length)]

    def close(self) -> None:
        """All engines audit clean, and hold nothing once closed."""
        for engine in self.made:
            engine.audit()
            engine.close()
            assert engine.audit() == {}
            assert engine.stats().free == engine.stats().total


def ignore(_layer: int) -> None:
    """An `on_layer` that does nothing."""


def state(
    prompt: Sequence[int], params: SamplingParams = GREEDY, outputs: Sequence[int] = (), choice: int = 0
) -> SequenceState:
    """A sequence as the sampler sees it."""
    return SequenceState(params, prompt, list(outputs), choice)


def chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of chunks of at most `size`."""
    for start in range(0, length, size):
        yield start, min(start + size, length)


def prefill(engine: Engine, handle: KvHandle, wanted: SequenceState, chunk: int = 1000) -> TokenInfo:
    """Prefill prompt and outputs in chunks, and the next token."""
    ids = [*wanted.prompt_ids, *wanted.output_ids]
    result = None
    for start, end in chunks(len(ids), chunk):
        result = prefill_chunk(
            engine, handle, ids, start, end, on_layer=ignore, sample=[wanted] if end == len(ids) else ()
        )
    (token,) = result.tokens
    return token


def compute_between_layers(engine: Engine, outer: Sequence[int], inner: Sequence[int]) -> None:
    """Compute a prompt in chunks, and another one after each layer of each chunk: both are as if computed alone."""
    wanted, between = state(outer, MIXED[1]), state(inner, MIXED[1])
    expected = [
        prefill(engine, engine.reserve(f"alone/{index}", each.length), each, 24)
        for index, each in enumerate((wanted, between))
    ]
    found: list[TokenInfo] = []

    def on_layer(_layer: int) -> None:
        handle = engine.reserve("inner", len(inner))
        found.append(prefill(engine, handle, between, 24))
        engine.free(handle)

    handle, parts = engine.reserve("outer", len(outer)), list(chunks(len(outer), 24))
    for first, last in parts:
        sample = [wanted] if last == len(outer) else ()
        result = prefill_chunk(engine, handle, outer, first, last, on_layer=on_layer, sample=sample)
    assert result.tokens == (expected[0],)
    assert found == [expected[1]] * len(parts) * engine.spec.kv_format.layers


def start(engine: Engine, owner: str, wanted: SequenceState, room: int = 40) -> tuple[KvHandle, list[int]]:
    """Prefill and insert; the handle and its output ids so far."""
    handle = engine.reserve(owner, wanted.length + room)
    first = prefill(engine, handle, wanted).token_id
    outputs = [*wanted.output_ids, first]
    insert(engine, handle, SequenceState(wanted.params, wanted.prompt_ids, outputs, wanted.choice_index))
    return handle, outputs


def step(engine: Engine) -> dict[KvHandle, int]:
    """One step: the new token of each sequence."""
    return {handle: infos[0].token_id for handle, infos in found(engine.launch().result())}


def advance(engine: Engine, running: Sequence[tuple[KvHandle, list[int]]]) -> None:
    """One step, whose tokens are added to the outputs of these sequences."""
    tokens = step(engine)
    for handle, outputs in running:
        outputs.append(tokens[handle])


def generate(engine: Engine, wanted: SequenceState, count: int) -> list[int]:
    handle, outputs = start(engine, "alone", wanted, count)
    while len(outputs) < count:
        outputs.append(step(engine)[handle])
    engine.free(handle)
    engine.launch()
    return outputs


def move(source: Engine, origin: KvHandle, target: Engine, home: KvHandle, tokens: int, run: int = 11) -> None:
    """Transfer the KV of `tokens` tokens in frames of `run` tokens, one head at a time, last layer first."""
    kv_format = source.spec.kv_format
    for layer in reversed(range(kv_format.layers)):
        for head in range(kv_format.heads):
            for begin, end in chunks(tokens, run):
                parts = source.read_kv(origin, layer, range(begin, end), range(head, head + 1))
                target.write_kv(home, layer, begin, head, parts)


def whole_kv(engine: Engine, handle: KvHandle, tokens: int) -> list[PartData]:
    kv_format = engine.spec.kv_format
    return [
        part
        for layer in range(kv_format.layers)
        for part in engine.read_kv(handle, layer, range(tokens), range(kv_format.heads))
    ]


def copy_kv(engine: Engine, donor: KvHandle, owner: str, tokens: int) -> list[bytes]:
    """Content of new pages after the donor's KV was written to them: by layers, then by blocks but the first."""
    kv_format = engine.spec.kv_format
    target, heads = engine.reserve(owner, tokens), range(kv_format.heads)
    for layer in range(kv_format.layers):
        engine.write_kv(target, layer, 0, 0, engine.read_kv(donor, layer, range(tokens), heads))
    block = kv_format.block_size
    engine.write_blocks(target, block, engine.read_blocks(donor, block, tokens // block - 1))
    found = [bytes(part.data) for part in whole_kv(engine, target, tokens)]
    engine.free(target)
    return found


def payload_of(engine: Engine, handle: KvHandle, blocks: Sequence[range]) -> bytes:
    """Blocks as the format defines them, from what `read_kv` gives."""
    kv_format = engine.spec.kv_format
    return b"".join(
        bytes(part.data)
        for tokens in blocks
        for layer in range(kv_format.layers)
        for part in engine.read_kv(handle, layer, tokens, range(kv_format.heads))
    )


class ExecutorStub:
    """Stands before an engine's executor: `launch` is what the test gives, which may call `next`."""

    def __init__(self, engine: EngineCore, launch: Callable[..., Callable[[], PlanResult]]) -> None:
        self.next, self.launch = engine.executor, launch
        self.memory, self.close = engine.memory, self.next.close
        engine.executor = self


def spoil(engine: Engine, handle: KvHandle, token: int) -> None:
    """Make the KV of a token, in the first layer, no numbers."""
    nan = struct.pack("<f", math.nan)
    shapes = {part.name: (1, *part.shape) for part in engine.spec.kv_format.parts}
    parts = [PartData(name, "float32", shape, nan * math.prod(shape)) for name, shape in shapes.items()]
    engine.write_kv(handle, 0, token, 0, parts)
