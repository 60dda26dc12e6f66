"""Single calls of an engine, as tests make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.engine.contract import ChunkResult, Engine, KvHandle, PromptChunk, compute_chunk


def prefill_chunk(
    engine: Engine, handle: KvHandle, token_ids: Sequence[int], start: int, end: int, **more: Any
) -> ChunkResult:
    """Compute `token_ids[start:end]` in a pass of its own; `more` as in PromptChunk."""
    return compute_chunk(engine, PromptChunk(handle, token_ids, start, end, **more))
