"""Running a loaded model the way an engine does, without one: page tables, chunks, greedy steps."""

import torch
from torch import Tensor

from baton.engine.load import LoadedModel
from baton.model.attention import AttentionBatch, KvCache


class Sequence:
    """Tokens of one sequence and the pages that hold them; pages are scattered over the pool."""

    def __init__(self, kv: KvCache, room: int, first_page: int = 0) -> None:
        pages = -(-room // kv.page_size)
        order = torch.randperm(kv.num_pages, generator=torch.Generator().manual_seed(5))
        self.table = order[first_page : first_page + pages].int()
        assert len(self.table) == pages
        self.length = 0


def forward(
    model: LoadedModel, kv: KvCache, parts: list[tuple[Sequence, list[int]]], sampled: list[int] | None = None
) -> Tensor:
    """Compute the new tokens of each sequence together: hidden states `[T, hidden]`, or those of `sampled`."""
    width = max(len(sequence.table) for sequence, _ in parts)
    tables = torch.zeros(len(parts), width, dtype=torch.int32)
    for row, (sequence, _) in zip(tables, parts, strict=True):
        row[: len(sequence.table)] = sequence.table
    contexts = [sequence.length + len(ids) for sequence, ids in parts]
    batch = AttentionBatch.build([len(ids) for _, ids in parts], contexts, tables.to(model.device), kv.page_size)
    token_ids = torch.tensor([token for _, ids in parts for token in ids], device=model.device)
    hidden: Tensor = model.decoder(token_ids, batch.positions, batch, kv, sampled=sampled)
    for (sequence, _), context in zip(parts, contexts, strict=True):
        sequence.length = context
    return hidden


def chunked_logits(model: LoadedModel, ids: list[int], chunk: int, page_size: int) -> Tensor:
    """Logits of every position, `[len(ids), vocab]`, computed `chunk` tokens at a time."""
    kv = model.new_kv_cache(-(-len(ids) // page_size) + 2, page_size)
    sequence = Sequence(kv, len(ids))
    hidden = [forward(model, kv, [(sequence, ids[begin : begin + chunk])]) for begin in range(0, len(ids), chunk)]
    return model.decoder.logits(torch.cat(hidden))


def greedy_ids(model: LoadedModel, prompt: list[int], count: int, chunk: int, page_size: int) -> list[int]:
    """`count` greedy tokens after a chunked prefill."""
    room = len(prompt) + count
    kv = model.new_kv_cache(-(-room // page_size) + 2, page_size)
    sequence = Sequence(kv, room)
    for begin in range(0, len(prompt), chunk):
        hidden = forward(model, kv, [(sequence, prompt[begin : begin + chunk])])
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(model.decoder.logits(hidden[-1:]).argmax()))
        hidden = forward(model, kv, [(sequence, tokens[-1:])])
    return tokens
