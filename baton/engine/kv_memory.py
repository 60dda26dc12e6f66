"""The memory behind an engine's pages, as `baton.engine.core` uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from baton.kv.format import PartData


class KvMemory(Protocol):
    """Pages of all layers and parts, listed in token order. The caller has checked every range and holds a pin."""

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of a page, in all layers and parts."""

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        """One layer's parts as contiguous `[tokens, heads, ...]`."""

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        """Store one layer's parts, converting element types where they differ."""

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        """The payloads of `count` blocks (`baton.kv.format`), one after the other from `token_start` on."""

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        """Store payloads of blocks, one after the other from `token_start` on."""

    def save(self, pages: Sequence[int], tokens: int) -> Any:
        """A copy in host memory of the first `tokens` tokens, all layers and parts."""

    def restore(self, pages: Sequence[int], saved: Any) -> None:
        """Undo `save`, into other pages."""
