"""Parsers of addresses, sizes and lists of cores."""

from __future__ import annotations

import ipaddress
import re

from baton.errors import ConfigError, preview

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power, _letter: 1024**_power}
_CORES = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port"; raises ConfigError naming the text."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]]+)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ConfigError(f"must be HOST:PORT with a port of at most 65535, got {preview(text)}")
    return match[1] or match[2], int(match[3])


def join_address(host: str | int, port: int) -> str:
    """ "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def complete_address(address: str, dialled: str) -> str:
    """`address`, "host:port"; an empty host in it is replaced by the host of the `dialled` address."""
    host, _, port = address.rpartition(":")
    return address if host else join_address(parse_address(dialled)[0], int(port))


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
        raise ConfigError(f"must be a size such as 512MiB or 4GB, got {preview(text)}")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def format_bytes(size: int) -> str:
    """The shortest whole number with a binary unit, such as "256MiB"; `parse_bytes` reads it."""
    power = max(power for power in range(5) if size % 1024**power == 0) if size else 0
    return f"{size >> 10 * power}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def parse_cpus(text: str) -> frozenset[int]:
    """Core numbers of a list like "0-3,8", as in taskset; raises ConfigError."""
    numbers: set[int] = set()
    for part in text.split(",") if text else []:
        found = _CORES.fullmatch(part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise ConfigError(f"cpus: must be a list like 0-3,8, got {text!r}")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(numbers)
