"""A setting is a field of a frozen dataclass; click makes a flag and a variable from it.

    @dataclass(frozen=True, kw_only=True)
    class PrefillConfig(Settings):
        chunk_size: int = option(0, help="Tokens in a chunk.", minimum=0)             --chunk-size, BATON_CHUNK_SIZE
        kv_memory: int = option(0, help="Size of the KV pool; 0: automatic.", unit="bytes")

A flag overrides the variable, which overrides the default; a variable that is empty counts as not set. A flag may be
given once. A secret has no flag, because everybody can see command lines. The same click types check flags, variables
and settings made in code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from baton.config.values import format_bytes, parse_address, parse_bytes
from baton.errors import ConfigError, preview

STYLE = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Context settings of our commands."""


class Address(click.ParamType[str]):
    """HOST:PORT; with `optional` it may be empty."""

    name = "HOST:PORT"

    def __init__(self, *, optional: bool = False) -> None:
        self.optional = optional

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text itself, if it is an address."""
        try:
            if value or not self.optional:
                parse_address(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Size(click.ParamType[int]):
    """A size in bytes such as 4GiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        try:
            return parse_bytes(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class _Number(click.FloatRange):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class _Names(click.ParamType[tuple[str, ...]]):
    """Texts separated by commas."""

    name = "TEXT,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not (isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)):
            self.fail(f"must be texts, got {preview(value)}", param, ctx)
        return tuple(part.strip() for part in parts if part.strip())


class _Flag(click.Option):
    """An option whose errors name its variable; its help does not, because the names follow from the flags."""

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        extra = super().get_help_extra(ctx)
        extra.pop("envvars", None)
        return extra


class SettingsCommand(click.Command):
    """A command that refuses a flag that is given twice, and flags of `secrets`, which are names of settings."""

    def __init__(self, *args: Any, secrets: Collection[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._secrets = {flag_of(name): variable_of(name) for name in secrets}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and refuse repeated flags and flags of secrets."""
        try:
            _, _, given = self.make_parser(ctx).parse_args(list(args))
        except click.NoSuchOption as error:
            if error.option_name not in self._secrets:
                raise
            # click would show the flag that is spelled most like it.
            problem = f"there is no flag {error.option_name}, because everybody can see command lines"
            raise click.UsageError(f"{problem}: set {self._secrets[error.option_name]}", ctx) from None
        for param in given:
            if isinstance(param, click.Option) and not param.multiple and given.count(param) > 1:
                raise click.UsageError(f"{param.opts[0]} is given {given.count(param)} times", ctx)
        return super().parse_args(ctx, args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of settings. All fields are made by `option`.

    Raises ConfigError naming the field and the value seen.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                converted = field.metadata["type"].convert(value, None, None)
            except click.BadParameter as error:
                raise ConfigError(f"{field.name}: {error.message}") from None
            if converted != value:
                raise ConfigError(f"{field.name}: must be of type {type(field.default).__name__}, got {preview(value)}")


def option(
    default: Any,
    *,
    help: str,
    choices: Sequence[str] = (),
    unit: str = "",
    minimum: Any = None,
    secret: bool = False,
    shown: bool = True,
    hidden: bool = False,
) -> Any:
    """A field of a settings class; its type follows from the default.

    `unit` is "" (none), "bytes" ("4GiB") or "address" ("host:port", or empty if the default is). A secret comes only
    from the environment, and appears in no help and no `repr`. A field that is not `shown` may contain a secret, and
    appears in no `repr`. A `hidden` field has a flag and a variable, but does not appear in the help.
    """
    metadata = {"help": help, "type": _type(default, choices, unit, minimum), "secret": secret, "hidden": hidden}
    return dataclasses.field(default=default, repr=shown and not secret, metadata=metadata)


def _type(default: Any, choices: Sequence[str], unit: str, minimum: Any) -> click.ParamType[Any]:
    if choices:
        return click.Choice(choices)
    if unit:
        return {"address": Address(optional=not default), "bytes": Size()}[unit]
    types: dict[type, click.ParamType[Any]] = {
        str: click.STRING,
        bool: click.BOOL,
        int: click.IntRange(min=minimum),
        float: _Number(min=minimum),
        tuple: _Names(),
    }
    return types[type(default)]


def flag_of(name: str) -> str:
    """The flag of a field: "--chunk-size"."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a field: "BATON_CHUNK_SIZE"."""
    return "BATON_" + name.upper()


def click_option(field: dataclasses.Field[Any], **changes: Any) -> click.Option:
    """The flag and variable of a field that is not a secret; `changes` override for example `default` or `help`."""
    kind = field.metadata["type"]
    default = format_bytes(field.default) if isinstance(kind, Size) else field.default  # type: ignore[arg-type]
    attributes: dict[str, Any] = {
        "type": kind,
        "default": default,
        "help": field.metadata["help"],
        "envvar": variable_of(field.name),
        "show_envvar": True,
        "hidden": field.metadata["hidden"],
        "show_default": default not in ("", ()) and kind is not click.BOOL,
    }
    if kind is click.BOOL:
        attributes |= {"is_flag": False, "flag_value": True}
    return _Flag([flag_of(field.name)], **attributes | changes)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a ConfigError, which begins with the name of a setting, into a usage error of the running command."""
    try:
        yield
    except ConfigError as error:
        name, _, problem = str(error).partition(": ")
        context = click.get_current_context()
        for param in context.command.params:
            if flag_of(name) in param.opts:
                raise click.BadParameter(problem, context, param) from None
        raise click.UsageError(str(error)) from None
