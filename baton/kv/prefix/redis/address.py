"""Addresses of the shared prefix cache: the URLs of the `--redis` setting. Pure; loads no Redis client.

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DB][?OPTIONS]                      one server
    unix://[[USER]:PASSWORD@]/PATH[?db=DB]                                    one server on a unix socket
    redis+cluster://[[USER]:PASSWORD@]HOST[:PORT],...[?OPTIONS]               a cluster, found through any of these
    redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT],.../SERVICE[/DB][?OPTIONS] the master that these sentinels name

`rediss` instead of `redis` means TLS. Options are those of redis-py's URLs that are listed below; users and passwords
are percent-encoded. Sentinels get the user and password of `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

from baton.errors import ConfigError

SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+cluster://",
    "rediss+cluster://",
    "redis+sentinel://",
    "rediss+sentinel://",
)

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path")
_TLS = (*_FILES, "ssl_cert_reqs", "ssl_check_hostname", "ssl_password", "ssl_min_version", "ssl_ciphers")
_SERVER = ("db", "username", "password", "client_name")
_SENTINEL = ("sentinel_username", "sentinel_password")
_PORT, _SENTINEL_PORT = 6379, 26379


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL. `url` is the part that redis-py understands: its user, options and first host."""

    kind: Literal["server", "cluster", "sentinel"]
    url: str = field(repr=False)
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_user: str = ""
    sentinel_password: str = field(default="", repr=False)


def check_url(url: str) -> None:
    """Raise ConfigError for a `--redis` setting that is neither empty, none, nor a valid URL."""
    if url not in ("", "none"):
        parse_redis_url(url)


def parse_redis_url(url: str) -> RedisAddress:
    """Raises ConfigError for a bad URL; the message contains no password."""
    scheme, found, rest = url.partition("://")
    if not found or f"{scheme}://" not in SCHEMES:
        raise ConfigError(f"redis: must be none or begin with {', '.join(SCHEMES)}, got {_redact(url)!r}")
    base, _, kind = scheme.partition("+")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    user, at, hosts = authority.rpartition("@")
    if "@" in query or "#" in url or not authority.isascii() or set("[]").intersection(user):
        # A parser could mistake a part of the password for another field, and show it.
        raise ConfigError("redis: users, passwords and options must be percent-encoded")
    options = _options(query, base == "rediss", kind == "sentinel", url)
    plain = "&".join(pair for pair in query.split("&") if not pair.startswith("sentinel_"))
    if base == "unix":
        if hosts or not path:
            raise ConfigError(f"redis: must be unix:// and an absolute path, got {_redact(url)!r}")
        return RedisAddress("server", url)
    addresses = tuple(_host(host, _SENTINEL_PORT if kind == "sentinel" else _PORT, url) for host in hosts.split(","))
    if not kind and len(addresses) > 1:
        raise ConfigError(f"redis: {scheme}:// takes one host, got {_redact(url)!r}")
    service, _, db = path.partition("/") if kind == "sentinel" else ("", "", path)
    db = db.rstrip("/")
    if kind == "sentinel" and not service:
        raise ConfigError(f"redis: needs the name of the service after the sentinels, got {_redact(url)!r}")
    if not all(number.isdecimal() for number in (db or "0", options.get("db", "0"))):
        raise ConfigError(f"redis: the database must be a number, got {_redact(url)!r}")
    if kind == "cluster" and int(options.get("db", db or "0")):
        raise ConfigError(f"redis: a cluster has no databases but 0, got {_redact(url)!r}")
    host, port = addresses[0]
    return RedisAddress(
        kind="cluster" if kind == "cluster" else "sentinel" if kind == "sentinel" else "server",
        url=f"{base}://{user}{at}{f'[{host}]' if ':' in host else host}:{port}/{db}?{plain}",
        hosts=addresses,
        service=service,
        sentinel_user=options.get("sentinel_username", ""),
        sentinel_password=options.get("sentinel_password", ""),
    )


def _host(text: str, port: int, url: str) -> tuple[str, int]:
    host, colon, number = text, "", ""
    if text.startswith("["):
        host, closed, number = text[1:].partition("]")
        colon, number = number[:1], number[1:]
        if not closed or colon not in ("", ":"):
            raise ConfigError(f"redis: not an address: {text!r}, got {_redact(url)!r}")
    elif ":" in text:
        host, colon, number = text.rpartition(":")
    if colon and not (number.isdecimal() and 0 < int(number) < 1 << 16):
        raise ConfigError(f"redis: the port must be a number from 1 to 65535, got {_redact(url)!r}")
    if not host and (colon or "," in url.rpartition("@")[2]):
        raise ConfigError(f"redis: a host is missing, got {_redact(url)!r}")
    return host or "localhost", int(number) if colon else port


def _options(query: str, tls: bool, sentinel: bool, url: str) -> dict[str, str]:
    known = _SERVER + (_TLS if tls else ()) + (_SENTINEL if sentinel else ())
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in known:
            why = "needs rediss" if name in _TLS else f"must be one of {', '.join(known)}"
            raise ConfigError(f"redis: option {name!r} {why}, got {_redact(url)!r}")
        if name in _FILES and not Path(value).exists():
            raise ConfigError(f"redis: {name}: no such file: {value!r}")
    return options


def _redact(url: str) -> str:
    """The URL without user, password and options."""
    scheme, found, rest = url.partition("?")[0].partition("://")
    return scheme.rpartition("@")[2] + found + rest.rpartition("@")[2]
