"""Single calls of an engine, as tests make them."""

from collections import abc
from typing import Any

from baton.engine.contract import ChunkResult, Engine, KvHandle, PassResult, PromptChunk, Sequence, compute_chunk
from baton.request import SequenceState


def prefill_chunk(
    engine: Engine, handle: KvHandle, token_ids: abc.Sequence[int], start: int, end: int, **more: Any
) -> ChunkResult:
    """Compute `token_ids[start:end]` in a pass of its own; `more` as in PromptChunk."""
    return compute_chunk(engine, PromptChunk(handle, token_ids, start, end, **more))


def insert(engine: Engine, handle: KvHandle, state: SequenceState) -> Sequence:
    """Give a new sequence a slot."""
    sequence = Sequence(handle, state)
    engine.insert(sequence)
    return sequence


def found(result: PassResult) -> list[tuple[KvHandle, Any]]:
    """Tokens of each sequence in a step, by its handle."""
    return [(sequence.handle, tokens) for sequence, tokens in result.steps]
