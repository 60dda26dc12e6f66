"""From the `--redis` setting to a prefix cache."""

from __future__ import annotations

import logging

from baton.errors import ConfigError
from baton.kv.format import KvFormat
from baton.kv.prefix.contract import PrefixCache
from baton.kv.prefix.memory import NullPrefixCache

SCHEMES = ("redis://", "rediss://", "unix://")

_log = logging.getLogger(__name__)


def check_url(url: str) -> None:
    """Raise ConfigError for a setting of which no prefix cache can be made."""
    if url not in ("", "none") and not url.startswith(SCHEMES):
        seen = url.rpartition("@")[2]
        raise ConfigError(f"redis: must be none or begin with {', '.join(SCHEMES)}, got {seen!r}")


def open_prefix_cache(url: str, kv_format: KvFormat, fleet_secret: str) -> PrefixCache:
    """The cache at `url`, or none for "none" and ""; raises ConfigError for a URL that can't be used.

    Connects at the first use: a Redis that is not there is a miss.
    """
    check_url(url)
    if url in ("", "none"):
        return NullPrefixCache()
    if not fleet_secret:
        _log.warning("no fleet secret is set: whoever can write to Redis can plant cached blocks")
    from baton.kv.prefix.redis import RedisPrefixCache

    return RedisPrefixCache(url, kv_format, fleet_secret)
