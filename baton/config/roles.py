"""The settings of each role, read from flags and variables.

One environment can serve all roles: a variable of another role is allowed, a variable of no role is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

import click

from baton.config.options import STYLE, Settings, SettingsCommand, click_option, usage_errors, variable_of
from baton.config.router import RouterConfig
from baton.config.worker import DecodeConfig, MixedConfig, PrefillConfig

S = TypeVar("S", bound=Settings)

ROLES: dict[str, type[Settings]] = {
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "mixed": MixedConfig,
    "router": RouterConfig,
}

_VARIABLES = {variable_of(field.name) for settings in ROLES.values() for field in fields(settings)}
_OTHER_VARIABLES = {"BATON_API_KEY", "BATON_NATIVE_ISA", "BATON_NATIVE_LIBRARY"}
"""Variables of clients, and of tests (baton/native/library.py)."""


def check_variables() -> None:
    """Raise click.UsageError for an unknown variable BATON_*."""
    for variable in os.environ:
        if variable.startswith("BATON_") and variable not in _VARIABLES | _OTHER_VARIABLES:
            raise click.UsageError(f"{variable}: unknown variable")


def command(settings: type[S], name: str, run: Callable[[S], Any]) -> click.Command:
    """A command that has a flag for each setting, and calls `run` with the settings."""

    def start(**values: Any) -> Any:
        check_variables()
        with usage_errors():
            config = settings(**values, **{each: os.environ.get(variable_of(each), "") for each in secrets})
        return run(config)

    secrets = {field.name: field.metadata["help"] for field in fields(settings) if field.metadata["secret"]}
    epilog = [
        "Each flag can also be a variable: BATON_LOG_LEVEL stands for --log-level. Timers and buffers that rarely need "
        "a change are listed in docs/operations.md."
    ]
    epilog += [f"A secret has only a variable. {variable_of(each)}: {text}" for each, text in secrets.items()]
    return SettingsCommand(
        name,
        secrets=secrets,
        params=[click_option(field) for field in fields(settings) if field.name not in secrets],
        callback=start,
        help=(settings.__doc__ or "").partition("\n")[0],
        epilog="\n\n".join(epilog),
        context_settings=STYLE,
    )


def load(settings: type[S], argv: Sequence[str]) -> S:
    """The settings from the flags `argv` and this process's variables; raises click.UsageError."""
    reader = command(settings, settings.__name__, lambda config: config)
    return cast(S, reader.main(list(argv), settings.__name__, standalone_mode=False))
