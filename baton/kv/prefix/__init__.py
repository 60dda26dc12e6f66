"""Prefix caching: the protocol, its implementations, and the record they store."""

from baton.kv.prefix.contract import Payload, PrefixCache
from baton.kv.prefix.null import NullPrefixCache
from baton.kv.prefix.open import check_url, open_prefix_cache

__all__ = ["NullPrefixCache", "Payload", "PrefixCache", "check_url", "open_prefix_cache"]
