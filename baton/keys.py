"""The file of API keys: their hashes, and the rights and limits of each key.

    {"keys": [{"sha256": "<64 hex digits>", "tenant": "acme", "max_streams": 16, "admin": false}]}

A key has KEY_BITS random bits and is not a password, so a plain SHA-256 protects it well enough: nobody can try that
many keys, with or without a slow hash. Keys of one tenant share its limits, which must be equal.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, preview

KEY_BITS = 256
MAX_KEY_LENGTH = 256
"""Longest text that is accepted as a key."""

_PREFIX = "baton_"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NEW_MODE = 0o600


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key: `sha256` is its hash, 32 bytes. `max_streams` is the most open streams of its tenant, or None."""

    sha256: bytes
    tenant: str
    max_streams: int | None = None
    admin: bool = False


def digest(key: str) -> bytes:
    """The hash of a key, as the file has it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse(data: bytes) -> tuple[ApiKey, ...]:
    """The entries of a file; raises ConfigError naming the field and the value seen."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}") from None
    _check_fields("the file", document, ("keys",), ("keys",))
    if not isinstance(document["keys"], list):
        raise ConfigError(f"keys: must be a list, got {preview(document['keys'])}")
    entries = tuple(_entry(f"keys[{index}]", each) for index, each in enumerate(document["keys"]))
    limits: dict[str, int | None] = {}
    hashes: set[bytes] = set()
    for index, entry in enumerate(entries):
        if entry.sha256 in hashes:
            raise ConfigError(f"keys[{index}].sha256: appears twice, got {entry.sha256.hex()!r}")
        hashes.add(entry.sha256)
        if limits.setdefault(entry.tenant, entry.max_streams) != entry.max_streams:
            first = _limit(limits[entry.tenant])
            problem = f"another key of {entry.tenant} says {first}, got {_limit(entry.max_streams)}"
            raise ConfigError(f"keys[{index}].max_streams: {problem}")
    return entries


def read(path: Path) -> tuple[ApiKey, ...]:
    """The entries of the file at `path`; none if it is not there. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} can't be read: {error.strerror}") from None
    try:
        return parse(data)
    except ConfigError as error:
        raise ConfigError(f"{str(path)!r}: {error}") from None


def add(path: Path, *, tenant: str, max_streams: int | None = None, admin: bool = False) -> str:
    """Make a key for a tenant, add its hash to the file, and return the key, which is stored nowhere.

    The file is replaced in one step. If it is new, only its owner may read it. Several processes may add keys at the
    same time. Without `max_streams` a tenant keeps its limit. Raises ConfigError.
    """
    key = _PREFIX + secrets.token_urlsafe(KEY_BITS // 8)
    with _edit(path) as entries:
        if max_streams is None:
            max_streams = next((entry.max_streams for entry in entries if entry.tenant == tenant), None)
        entries.append(ApiKey(digest(key), tenant, max_streams, admin))
    return key


def remove(path: Path, *, tenant: str = "", sha256: str = "") -> int:
    """Remove all keys of a tenant, or the one whose hash begins with these hex digits; returns their number.

    Raises ConfigError if there is none, or if several begin like that.
    """
    with _edit(path) as entries:
        gone = [entry for entry in entries if _matches(entry, tenant, sha256)]
        if not gone:
            raise ConfigError(f"{str(path)!r} has no key of {preview(tenant) if tenant else f'hash {preview(sha256)}'}")
        if len(gone) > 1 and not tenant:
            raise ConfigError(f"{len(gone)} hashes begin with {preview(sha256)}; give more digits")
        entries[:] = [entry for entry in entries if entry not in gone]
    return len(gone)


def limit(path: Path, *, tenant: str, max_streams: int | None) -> int:
    """Set how many streams a tenant may have open, None for no limit; returns the number of its keys.

    Raises ConfigError.
    """
    with _edit(path) as entries:
        count = sum(entry.tenant == tenant for entry in entries)
        if not count:
            raise ConfigError(f"{str(path)!r} has no key of {preview(tenant)}")
        entries[:] = [replace(entry, max_streams=max_streams) if entry.tenant == tenant else entry for entry in entries]
    return count


def _matches(entry: ApiKey, tenant: str, sha256: str) -> bool:
    return entry.tenant == tenant if tenant else bool(sha256) and entry.sha256.hex().startswith(sha256)


@contextmanager
def _edit(path: Path) -> Iterator[list[ApiKey]]:
    """Yield the entries, which the block may change.

    The file is locked meanwhile; if the block raises, it does not change.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{str(path.parent)!r} can't be opened: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        entries = list(read(path))
        yield entries
        data = _encoded(entries)
        parse(data)
        _replace(path, data)
    finally:
        os.close(folder)


def _entry(where: str, value: Any) -> ApiKey:
    _check_fields(where, value, [field.name for field in fields(ApiKey)], ("sha256", "tenant"))
    sha256, tenant = value["sha256"], value["tenant"]
    if not (isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256)):
        raise ConfigError(f"{where}.sha256: must be 64 hex digits in lower case, got {preview(sha256)}")
    if not (isinstance(tenant, str) and _TENANT.fullmatch(tenant)):
        raise ConfigError(f"{where}.tenant: must be 1 to 64 letters, digits and ._-, got {preview(tenant)}")
    limit, admin = value.get("max_streams"), value.get("admin", False)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(f"{where}.max_streams: must be a whole number of at least 1, got {preview(limit)}")
    if type(admin) is not bool:
        raise ConfigError(f"{where}.admin: must be true or false, got {preview(admin)}")
    return ApiKey(bytes.fromhex(sha256), tenant, limit, admin)


def _check_fields(where: str, value: Any, known: Sequence[str], required: Sequence[str]) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be an object, got {preview(value)}")
    if unknown := sorted(set(value).difference(known)):
        raise ConfigError(f"{where}: has no field {preview(unknown[0])}; known are {', '.join(known)}")
    if missing := [name for name in required if name not in value]:
        raise ConfigError(f"{where}.{missing[0]}: is missing")


def _limit(value: int | None) -> str:
    return "no limit" if value is None else str(value)


def _encoded(entries: Sequence[ApiKey]) -> bytes:
    listed = []
    for entry in entries:
        each: dict[str, Any] = {"sha256": entry.sha256.hex(), "tenant": entry.tenant}
        if entry.max_streams is not None:
            each["max_streams"] = entry.max_streams
        listed.append(each | {"admin": entry.admin})
    return (json.dumps({"keys": listed}, indent=2) + "\n").encode()


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.new")
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else _NEW_MODE
        beside.unlink(missing_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _NEW_MODE), "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} can't be written: {error.strerror}") from None
