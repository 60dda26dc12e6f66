"""Configuration: a frozen dataclass, filled once from flags and environment.

Each field of the class is a flag (`chunk_size` is `--chunk-size`) and a variable (`BATON_CHUNK_SIZE`); a
flag beats the variable, which beats the default. A field made with `option` may say more: help, choices, a
unit, a minimum, or that it is a secret, which is read from the environment only, since command lines can be
seen by everybody.

    @dataclass(frozen=True)
    class PrefillConfig:
        control: str = option("127.0.0.1:0", help="Address of the control listener.", unit="address")
        kv_memory: int = option(0, help="Memory for KV; 0 is automatic.", unit="bytes")

Whatever is unknown or unreadable is refused by name. One environment can serve all roles: a variable that
belongs to another role is no error, one that belongs to none is.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Any, TypeVar

from baton.errors import ConfigError, shown

T = TypeVar("T")

PREFIX = "BATON_"

_ROLE_FIELDS = """
model served_model_name device dtype kv_dtype max_model_len kv_memory page_size block_size threads cpus control kv
ops kv_advertise worker_id insecure log_level chunk_size max_waiting redis fleet_secret
cache_memory cache_budget_s cache_ttl_s cache_writes lease_s slots
convert_kv kv_compression reserve_tokens host_kv_memory resident_kv_memory stall_s drain_s
fetch_timeout_s fetch_stall_s start_timeout_s
prefill decode grpc processes line_capacity line_wait_s prefill_limit max_attempts reserve_timeout_s worker_wait_s
resolve_s client_stall_s
request_timeout_s prefill_silence_s isolation_wait_s
tls_cert tls_key tls_ca client_certs ticket_keys ticket_key api_keys
"""
ROLE_FIELDS = frozenset(_ROLE_FIELDS.split())
"""Fields of any role's configuration; a test compares them with the classes."""

_CLIENT_VARIABLES = frozenset({"api_key"})

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power, _letter: 1024**_power}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def option(
    default: Any,
    *,
    help: str,
    choices: Sequence[str] = (),
    unit: str = "",
    minimum: float | None = None,
    secret: bool = False,
    shown: bool = True,
) -> Any:
    """A field of a configuration class; `unit` is "" (none), "bytes" ("4GiB") or "address" ("host:port").

    A secret comes from the environment alone, and is in no help and no `repr`; what is not `shown` may hold a
    secret, and is in no `repr` either.
    """
    metadata = {"help": help, "choices": tuple(choices), "unit": unit, "minimum": minimum, "secret": secret}
    return dataclasses.field(default=default, repr=shown and not secret, metadata=metadata)


def load(cls: type[T], prog: str, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> T:
    """Make a `cls` from `argv` (default: the process's arguments) and `environ` (default: the process's).

    Prints the help and raises SystemExit(0) at `--help`. Raises ConfigError naming the flag or variable and
    the value seen.
    """
    argv = sys.argv[1:] if argv is None else argv
    environ = os.environ if environ is None else environ
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    types = typing.get_type_hints(cls)
    if "--help" in argv or "-h" in argv:
        print(_help(cls, prog, list(fields.values()), types))
        raise SystemExit(0)
    texts = _from_environment(fields, environ) | _from_flags(fields, types, argv)
    values = {name: _parse(text, types[name], fields[name], source) for name, (source, text) in texts.items()}
    for field in fields.values():
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{_flag(field)} or {_variable(field)} is required")
    return cls(**values)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port"; raises ConfigError naming the text."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]]+)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ConfigError(f"must be HOST:PORT with a port of at most 65535, got {shown(text)}")
    return match[1] or match[2], int(match[3])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_bytes(text: str) -> int:
    """A size in bytes from "512", "4GiB", "1.5 GB" or "64M" (a bare letter is binary); raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"must be a size such as 512MiB or 4GB, got {shown(text)}")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def check_variables(environ: Mapping[str, str], fields: Collection[str] = ()) -> None:
    """Raise ConfigError at a variable that belongs to no role, to no client, and is none of `fields`."""
    known = {PREFIX + name.upper() for name in (*fields, *ROLE_FIELDS, *_CLIENT_VARIABLES)}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            raise ConfigError(f"{variable}: unknown variable")


def _from_environment(fields: Mapping[str, Field[Any]], environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    check_variables(environ, fields)
    variables = {name: PREFIX + name.upper() for name in fields}
    return {name: (variable, environ[variable]) for name, variable in variables.items() if variable in environ}


def _from_flags(
    fields: Mapping[str, Field[Any]], types: Mapping[str, Any], argv: Sequence[str]
) -> dict[str, tuple[str, str]]:
    flags = {_flag(field): field for field in fields.values()}
    found: dict[str, tuple[str, str]] = {}
    rest = list(argv)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        field = flags.get(flag)
        if field is None:
            raise ConfigError(f"{flag}: unknown flag")
        if field.metadata.get("secret"):
            raise ConfigError(f"{flag}: a secret is read from {_variable(field)} only")
        if not equals:
            bare = types[field.name] is bool and (not rest or rest[0].lower() not in _TRUE + _FALSE)
            if not bare and not rest:
                raise ConfigError(f"{flag}: needs a value")
            text = "true" if bare else rest.pop(0)
        if field.name in found:
            raise ConfigError(f"{flag}: given twice")
        found[field.name] = (flag, text)
    return found


def _parse(text: str, kind: Any, field: Field[Any], source: str) -> Any:
    try:
        value = _converter(kind, field)(text)
        choices, minimum = field.metadata.get("choices"), field.metadata.get("minimum")
        if choices and value not in choices:
            raise ConfigError(f"must be one of {', '.join(choices)}, got {shown(text)}")
        if minimum is not None and value < minimum:
            raise ConfigError(f"must be at least {minimum}, got {shown(text)}")
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return value


def _converter(kind: Any, field: Field[Any]) -> Callable[[str], Any]:
    unit = field.metadata.get("unit")
    if unit == "bytes":
        return parse_bytes
    if unit == "address":
        return _address
    converters: dict[Any, Callable[[str], Any]] = {
        str: str,
        int: _number(int, "an integer"),
        float: _number(float, "a number"),
        bool: _boolean,
        tuple[str, ...]: lambda text: tuple(part.strip() for part in text.split(",") if part.strip()),
    }
    return converters[kind]


def _address(text: str) -> str:
    parse_address(text)
    return text


def _number(kind: type[int] | type[float], words: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"must be {words}, got {shown(text)}") from None
        if not math.isfinite(value):
            raise ConfigError(f"must be {words}, got {shown(text)}")
        return value

    return convert


def _boolean(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ConfigError(f"must be true or false, got {shown(text)}")
    return text.lower() in _TRUE


def _flag(field: Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _variable(field: Field[Any]) -> str:
    return PREFIX + field.name.upper()


def _help(cls: type[Any], prog: str, fields: Sequence[Field[Any]], types: Mapping[str, Any]) -> str:
    lines = [
        f"usage: {prog} [FLAG VALUE | FLAG=VALUE]...",
        "",
        (cls.__doc__ or "").strip().partition("\n")[0],
        "",
    ]
    for field in fields:
        name = _variable(field) if field.metadata.get("secret") else f"{_flag(field)}, {_variable(field)}"
        lines.append(f"  {name}")
        about = [field.metadata.get("help", "")]
        if choices := field.metadata.get("choices"):
            about.append(f"One of {', '.join(choices)}.")
        if field.default not in (MISSING, "", ()) and types[field.name] is not bool:
            about.append(f"Default: {field.default}.")
        lines.append(f"      {' '.join(part for part in about if part)}")
    return "\n".join(lines)
