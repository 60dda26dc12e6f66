"""Tables on standard output: fitted to a terminal, one line a row where there is none."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

_ANY_WIDTH = 1 << 20


def output() -> Console:
    """Standard output."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # A row has one line, however long, for grep to find.
        console.width = _ANY_WIDTH
    return console


def table(columns: Sequence[str], numbers: Collection[str]) -> Table:
    """An empty table; those of its columns in `numbers` are flush right."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made


def size(count: float) -> str:
    """Bytes in words."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
