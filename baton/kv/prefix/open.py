"""Makes a prefix cache from the `--redis` setting."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.kv.format import KvFormat
from baton.kv.prefix.address import parse_redis_url
from baton.kv.prefix.contract import PrefixCache
from baton.kv.prefix.host import HostPrefixCache
from baton.kv.prefix.null import NullPrefixCache
from baton.kv.prefix.write_filter import WriteFilter

if TYPE_CHECKING:
    from baton.kv.prefix.redis import RedisLimits

_log = logging.getLogger(__name__)


def check_url(url: str) -> None:
    """Raise ConfigError for a setting that is not a valid URL of a prefix cache."""
    if url not in ("", "none"):
        parse_redis_url(url)


def open_prefix_cache(
    url: str,
    kv_format: KvFormat,
    fleet_secret: str,
    *,
    cache_memory: int = 0,
    limits: RedisLimits | None = None,
    writes: str = "first",
) -> PrefixCache:
    """A cache of `cache_memory` bytes of host memory, then the store at `url`; 0 and "none" or "" leave them out.

    `writes` says when blocks go to the store: "first", "second" or "never". Raises ConfigError for a URL that can't
    be used. Connects at the first use; without a Redis there, look-ups miss.
    """
    check_url(url)
    host = HostPrefixCache(cache_memory)
    if url in ("", "none"):
        return host if host.enabled else NullPrefixCache()
    if not fleet_secret:
        _log.warning("no fleet secret is set: whoever can write to Redis can plant cached blocks")
    from baton.kv.prefix.redis import RedisPrefixCache
    from baton.kv.prefix.tiered import TieredPrefixCache

    write_filter = WriteFilter()
    shared = RedisPrefixCache(
        url, kv_format, fleet_secret, limits, lost=write_filter.mark_missed, refused=write_filter.mark_refused
    )
    return TieredPrefixCache(host, shared, writes, write_filter=write_filter)
