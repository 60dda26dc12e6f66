"""Figures of a plan, which all its commands show alike: as a table, as JSON, or with their formulas.

`MODEL` is read here too: a checkpoint directory, a config.json, or the name of a row of SHAPES.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from baton.cli.options import output, table
from baton.config.options import Size
from baton.errors import ModelError
from baton.planner.hardware import HARDWARE
from baton.planner.shape import SHAPES, ModelShape

BOOK = "How to Scale Your Model"
"""https://jax-ml.github.io/scaling-book; a source is this with the chapter."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `unit` is "B" for bytes; `formula` has the numbers put in; `source` says where the formula is from.

    `value` is a text for an answer such as "yes".
    """

    name: str
    value: int | float | str
    unit: str = ""
    formula: str = ""
    source: str = ""


Groups = Mapping[str, Sequence[Figure]]
"""Figures under headings; an empty heading is not shown."""


def show(groups: Groups, *, as_json: bool = False, explain: bool = False) -> None:
    """Print figures to standard output; with `explain`, each with its formula and source."""
    if as_json:
        click.echo(json.dumps({name: [_fields(each) for each in group] for name, group in groups.items()}, indent=2))
        return
    console = output()
    for index, (heading, figures) in enumerate(groups.items()):
        if index:
            console.print()
        if heading:
            console.print(heading, style="bold", soft_wrap=True)
        if explain:
            for each in figures:
                console.print(f"{each.name}: {_value(each)}{_sizes(each, ' ({})')}", soft_wrap=True)
                for name, text in (("=", each.formula), ("source:", each.source)):
                    if text:
                        console.print(f"    {name} {text}", soft_wrap=True)
            continue
        rows = table(("", "value", "size"), ("value",))
        rows.show_header = False
        for each in figures:
            rows.add_row(each.name, _value(each), _sizes(each))
        console.print(rows)


def _fields(figure: Figure) -> dict[str, Any]:
    """Fields of a figure for JSON; a number of bytes is in GB and GiB too."""
    value = figure.value
    sizes = {"gb": value / 1e9, "gib": value / 2**30} if figure.unit == "B" and not isinstance(value, str) else {}
    return {**asdict(figure), **sizes}


def _value(figure: Figure) -> str:
    value = figure.value
    return f"{value if isinstance(value, str) else number(value)} {figure.unit}".rstrip()


def number(value: float) -> str:
    """A number as it is shown: four digits, but all digits of an integer and of the thousands of others below 1e7."""
    if isinstance(value, int) or 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def _sizes(figure: Figure, layout: str = "{}") -> str:
    """The value in GB and GiB, if it is a number of bytes of 1 MB or more."""
    if figure.unit != "B" or isinstance(figure.value, str) or figure.value < 1e6:
        return ""
    return layout.format(f"{figure.value / 1e9:,.3f} GB, {figure.value / 2**30:,.3f} GiB")


def with_positions(answer: str, context: int, shape: ModelShape) -> str:
    """An answer to whether sequences of `context` tokens fit, with a remark if they are longer than the model's."""
    most = shape.max_positions
    return answer if most is None or context <= most else f"{answer}, but the model has {most:,} positions"


BATCH = click.IntRange(1, 1 << 20)
"""Sequences of a plan. The arithmetic of workspaces takes time and memory for each of them."""


class MemorySize(Size):
    """A size with a unit, of 1 MiB or more, or the name of a device that has so much."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes; raises click.BadParameter."""
        if isinstance(value, int):
            return value
        if (row := HARDWARE.get(str(value).lower())) is not None:
            return row.memory
        if re.fullmatch(r"[\d.\s]+", str(value)):
            self.fail(f"{value!r} has no unit, such as in 80GB or 80GiB", param, ctx)
        size = super().convert(value, param, ctx)
        if size < 1 << 20:
            self.fail(f"must be 1MiB or more, got {value!r}", param, ctx)
        return size


def size_text(size: int) -> str:
    """A size as people write it: "80GiB" or "80GB" where this is exact."""
    for base, units in ((1024, ("MiB", "GiB", "TiB")), (1000, ("MB", "GB", "TB"))):
        powers = [power for power in (2, 3, 4) if size % base**power == 0]
        if powers and size:
            return f"{size // base ** powers[-1]}{units[powers[-1] - 2]}"
    return f"{size / 1e9:,.3f} GB"


class ShapeParam(click.ParamType[ModelShape]):
    """A model by directory, config.json or name."""

    name = "MODEL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ModelShape:
        """Its shape; raises click.BadParameter."""
        if isinstance(value, ModelShape):
            return value
        if (shape := SHAPES.get(str(value).lower())) is not None:
            return shape
        path = Path(str(value))
        if not path.exists():
            self.fail(f"{value!r} is no folder, no config.json, and none of {', '.join(SHAPES)}", param, ctx)
        try:
            return ModelShape.from_pretrained(path)
        except ModelError as error:
            self.fail(str(error), param, ctx)


_OUTPUT = (
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option("--explain", is_flag=True, help="Print the formula and the source of each figure."),
)


def output_options(command: Any) -> Any:
    """Add --json and --explain, the arguments of `show`."""
    for option in reversed(_OUTPUT):
        command = option(command)
    return command
