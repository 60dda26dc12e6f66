"""Tables on standard output: fitted to a terminal; without one, each row is one line."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

_ANY_WIDTH = 1 << 20


def output() -> Console:
    """Standard output."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # Each row is one line, however long, so that grep finds it.
        console.width = _ANY_WIDTH
    return console


def table(columns: Sequence[str], numbers: Collection[str]) -> Table:
    """An empty table; the columns in `numbers` are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made


def size(count: float) -> str:
    """A number of bytes with its unit, for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
