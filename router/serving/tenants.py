"""Who calls: API keys, the tenants they stand for, and how many streams a tenant may have at a time.

    authorization: Bearer KEY ──▶ Caller (tenant, its limit, whether an admin) or Unauthenticated

Without a file of keys everybody is the one tenant "".

A tenant has a queue of its own, a salt of the prefix cache, and a number of open streams. Tokenize and Detokenize count
as streams too. GetModel does not: it takes no longer than a refusal.
"""

from __future__ import annotations

import contextlib
import hmac
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.errors import ConfigError, Overloaded, Unauthenticated
from baton.keys import MAX_KEY_LENGTH, ApiKey, digest, parse
from baton.watched import watch_file

HEADER = "authorization"
_SCHEME = "bearer"
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a call comes from; `max_streams` None means no limit."""

    tenant: str = ""
    max_streams: int | None = None
    admin: bool = False


ANYBODY = Caller(admin=True)
"""The caller where no keys are asked for."""


class Tenants:
    """Knows callers by their keys, and counts the streams of each tenant; lives on the event loop."""

    def __init__(self, path: str = "", fleet_secret: str = "") -> None:
        """`path` is the file of keys, empty for none; it is read again when it changes.

        Raises ConfigError naming what is wrong, which is so when there are several tenants and no fleet secret.
        """

        def keys(data: bytes) -> tuple[ApiKey, ...]:
            found = parse(data)
            if len(tenants := {key.tenant for key in found}) > 1 and not fleet_secret:
                problem = f"BATON_FLEET_SECRET must be set to keep the caches of {len(tenants)} tenants apart"
                raise ConfigError(problem)
            return found

        self._keys = watch_file(path, "api_keys", keys) if path else None
        self._streams: Counter[str] = Counter()

    def caller(self, authorization: Sequence[str]) -> Caller:
        """Whose key the values of the header have. Raises Unauthenticated."""
        if self._keys is None:
            return ANYBODY
        seen = digest(_key(authorization))
        found: ApiKey | None = None
        for key in self._keys.value():
            # All are looked at, so that the time taken does not tell which one it was.
            if hmac.compare_digest(key.sha256, seen):
                found = key
        if found is None:
            raise Unauthenticated("the API key is not known")
        return Caller(found.tenant, found.max_streams, found.admin)

    @contextlib.contextmanager
    def stream(self, caller: Caller) -> Iterator[None]:
        """Count a stream of the caller's tenant until the block ends. Raises Overloaded beyond the tenant's limit."""
        tenant, limit = caller.tenant, caller.max_streams
        if limit is not None and self._streams[tenant] >= limit:
            problem = f"{self._streams[tenant]} streams of tenant {tenant} are open, {limit} may be"
            raise Overloaded(f"max_streams: {problem}", _RETRY_S)
        self._streams[tenant] += 1
        try:
            yield
        finally:
            self._streams[tenant] -= 1
            if not self._streams[tenant]:
                del self._streams[tenant]


def _key(authorization: Sequence[str]) -> str:
    if not authorization:
        raise Unauthenticated(f"an API key is needed, as metadata {HEADER}: Bearer KEY")
    scheme, _, key = authorization[0].partition(" ")
    key = key.strip()
    if len(authorization) > 1 or scheme.lower() != _SCHEME or not 0 < len(key) <= MAX_KEY_LENGTH:
        raise Unauthenticated(f"the metadata {HEADER} must be one Bearer KEY of at most {MAX_KEY_LENGTH} characters")
    return key
