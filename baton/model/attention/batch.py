"""The sequences of one forward pass, as attention sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from baton.model.attention.segments import SegmentSource
from baton.model.tensors import upload


@dataclass(frozen=True, eq=False, slots=True)
class HostKv:
    """Sequences of a batch that have pages in host memory: all pages of each, by row, and the way to their KV."""

    tables: Mapping[int, Sequence[int]]
    source: SegmentSource


@dataclass(frozen=True, eq=False, slots=True)
class DeviceRows:
    """Some sequences of a batch: which of its tokens are theirs, int64 on its device, and a batch of them alone."""

    tokens: Tensor
    batch: AttentionBatch


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """Lengths and page tables of B sequences whose new tokens are computed together, in this order.

    `query_lens`: new tokens of each sequence, 1 or more. `context_lens`: all its tokens, with the new ones.
    `page_tables`: int32 `[B, max_pages]` on the compute device; entries past a sequence's last page are never
    followed. Derived tensors are computed at first use and kept, so each is made once a forward.

    `host` is there if some sequences have pages in host memory; their entries of `page_tables` are not used.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    page_tables: Tensor
    page_size: int
    host: HostKv | None = None

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        page_tables: Tensor,
        page_size: int,
        host: HostKv | None = None,
    ) -> AttentionBatch:
        """Check the lengths against each other and the tables. Raises ValueError with the values seen."""
        queries, contexts = tuple(query_lens), tuple(context_lens)
        if not len(queries) == len(contexts) == page_tables.shape[0] or not queries:
            counts = f"{len(queries)} query lengths, {len(contexts)} context lengths"
            raise ValueError(f"{counts}, {page_tables.shape[0]} page tables")
        for query, context in zip(queries, contexts, strict=True):
            if not 1 <= query <= context <= page_tables.shape[1] * page_size:
                capacity = f"{page_tables.shape[1]} pages of {page_size}"
                raise ValueError(f"query length {query} and context length {context} with {capacity}")
        return cls(queries, contexts, page_tables, page_size, host)

    def select(self, tokens: Sequence[int]) -> AttentionBatch:
        """A batch of some of the new tokens, given by ascending indices among all.

        Each run of consecutive tokens of one sequence is a sequence of the batch. All pages must be on the device.
        """
        rows, queries, contexts = list[int](), list[int](), list[int]()
        row = 0
        for at, token in enumerate(tokens):
            while token >= self._starts[row + 1]:
                row += 1
            if rows and rows[-1] == row and token == tokens[at - 1] + 1:
                queries[-1] += 1
                contexts[-1] += 1
            else:
                rows.append(row)
                queries.append(1)
                contexts.append(self.context_lens[row] - self._starts[row + 1] + token + 1)
        tables = self.page_tables
        if rows != list(range(len(tables))):
            tables = tables[upload(rows, torch.int64, self.device)]
        return self.build(queries, contexts, tables, self.page_size)

    @classmethod
    def step(
        cls,
        context_lens: Sequence[int],
        positions: Tensor,
        page_tables: Tensor,
        page_size: int,
        host: HostKv | None = None,
    ) -> AttentionBatch:
        """One new token for each sequence, at `positions` (int64 `[B]`, on the tables' device): the last of each."""
        batch = cls.build([1] * len(context_lens), context_lens, page_tables, page_size, host)
        batch.__dict__["positions"] = positions
        return batch

    @property
    def device(self) -> torch.device:
        """The device of page tables and derived tensors."""
        return self.page_tables.device

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.query_lens)

    def tokens_of(self, row: int) -> range:
        """Places of the new tokens of sequence `row` among those of all."""
        begin = self._starts[row]
        return range(begin, begin + self.query_lens[row])

    @cached_property
    def on_device(self) -> DeviceRows | None:
        """The sequences whose pages are all on the device; None if there is none."""
        in_host = self.host.tables if self.host is not None else {}
        rows = [row for row in range(len(self.query_lens)) if row not in in_host]
        if not rows:
            return None
        tokens = upload([token for row in rows for token in self.tokens_of(row)], torch.int64, self.device)
        queries, contexts = ([each[row] for row in rows] for each in (self.query_lens, self.context_lens))
        tables = self.page_tables[upload(rows, torch.int64, self.device)]
        batch = self.build(queries, contexts, tables, self.page_size)
        batch.__dict__["positions"] = self.positions[tokens]
        return DeviceRows(tokens, batch)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.query_lens))

    @cached_property
    def is_step(self) -> bool:
        """Whether each sequence has one new token."""
        return max(self.query_lens) == 1

    @cached_property
    def cu_query_lens(self) -> Tensor:
        """Running total of query lengths from 0, int32 `[B + 1]`."""
        return upload(self._starts, torch.int32, self.device)

    @cached_property
    def cu_context_lens(self) -> Tensor:
        """Running total of context lengths from 0, int32 `[B + 1]`."""
        return upload((0, *accumulate(self.context_lens)), torch.int32, self.device)

    @cached_property
    def context_lens_tensor(self) -> Tensor:
        """`context_lens` as int32 `[B]`."""
        if self.is_step:
            return (self.positions + 1).to(torch.int32)
        return upload(self.context_lens, torch.int32, self.device)

    @cached_property
    def positions(self) -> Tensor:
        """Each new token's position in its sequence, int64 `[T]`."""
        lengths = zip(self.query_lens, self.context_lens, strict=True)
        return torch.cat([torch.arange(context - query, context, device=self.device) for query, context in lengths])

    @cached_property
    def slots(self) -> Tensor:
        """The slot of each new token's K and V: page * page_size + offset in the page, int64 `[T]`."""
        if self.is_step:
            pages = self.page_tables.gather(1, (self.positions // self.page_size)[:, None])[:, 0].long()
            return pages * self.page_size + self.positions % self.page_size
        return self._slots_of(self._rows_of(self.query_lens), self.positions)

    @cached_property
    def context_slots(self) -> Tensor:
        """The slot of each token of all sequences, one sequence after the other, int64 `[sum of context_lens]`."""
        rows = self._rows_of(self.context_lens)
        positions = torch.arange(sum(self.context_lens), device=self.device) - self.cu_context_lens[rows]
        return self._slots_of(rows, positions)

    def _rows_of(self, lengths: Sequence[int]) -> Tensor:
        """The number of each sequence, as often as its length says; int64 on the batch's device."""
        rows, counts = torch.arange(len(lengths), device=self.device), upload(lengths, torch.int64, self.device)
        return rows.repeat_interleave(counts, output_size=sum(lengths))

    def _slots_of(self, rows: Tensor, positions: Tensor) -> Tensor:
        pages = self.page_tables[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size
