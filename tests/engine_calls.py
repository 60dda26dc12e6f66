"""Single calls of an engine, as tests make them."""

from collections.abc import Sequence
from typing import Any

from baton.engine.contract import ChunkResult, Engine, EngineSequence, KvHandle, PassResult, PromptChunk, compute_chunk
from baton.request import SequenceState


def prefill_chunk(
    engine: Engine, handle: KvHandle, token_ids: Sequence[int], start: int, end: int, **more: Any
) -> ChunkResult:
    """Compute `token_ids[start:end]` in a pass of its own; `more` as in PromptChunk."""
    return compute_chunk(engine, PromptChunk(handle, token_ids, start, end, **more))


def insert(engine: Engine, handle: KvHandle, state: SequenceState) -> EngineSequence:
    """Give a new sequence a slot."""
    sequence = EngineSequence(handle, state)
    engine.insert(sequence)
    return sequence


def found(result: PassResult) -> list[tuple[KvHandle, Any]]:
    """Tokens of each sequence in a step, by its handle."""
    return [(sequence.handle, tokens) for sequence, tokens in result.sequences]
