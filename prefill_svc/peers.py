"""Fetches a prefix from a decode worker that has it. If a fetch fails, the tokens are computed."""

from __future__ import annotations

import logging
import time

from baton.engine.contract import Engine, KvHandle
from baton.errors import TransferError
from baton.kv.prefix.contract import FetchRate
from baton.rates import DecayingRate
from baton.request import PrefixSource
from baton.rpc.tls import Tls
from baton.transfer.fetcher import fetch_prefix
from baton.transfer.transport import KvChannels, open_sources

_SLOWEST_BYTES_PER_S = 100e6

_log = logging.getLogger(__name__)


class PeerFetcher:
    """Decode workers as a cache tier; used on the asyncio loop only. Tickets are made out to `consumer`.

    A fetch may take `budget_s` plus the time of its bytes at 100 MB/s. It fails if the exporter sends nothing for
    `budget_s`.
    """

    def __init__(self, engine: Engine, tls: Tls | None, consumer: str, budget_s: float) -> None:
        self._engine = engine
        self._token_bytes = engine.spec.kv_format.token_bytes
        self._channels = KvChannels(tls, "decode")
        self._consumer = consumer
        self._budget_s = budget_s
        self._bytes_per_s = DecayingRate()

    @property
    def rate(self) -> FetchRate | None:
        """The measured rate of recent fetches; None before the first one that succeeded."""
        bytes_per_s = self._bytes_per_s.value
        return FetchRate(0.0, bytes_per_s) if bytes_per_s else None

    async def fetch(self, handle: KvHandle, source: PrefixSource, tokens: range, digest: bytes) -> bool:
        """Pull `tokens` of the source's prefix into the handle; False if not all of them arrived.

        `digest` is that of the last full block of the source's prefix, as this worker computed it. Returns or raises,
        also when cancelled, only after the last write has ended.
        """
        size, arrived, began = len(tokens) * self._token_bytes, 0, time.monotonic()
        timeout_s = self._budget_s + size / _SLOWEST_BYTES_PER_S
        try:
            async with open_sources(
                self._channels,
                source.export,
                timeout_s=timeout_s,
                stall_timeout_s=self._budget_s,
                consumer=self._consumer,
            ) as sources:
                await fetch_prefix(
                    sources,
                    self._engine,
                    handle,
                    tokens=tokens,
                    length=source.tokens,
                    digest=digest,
                    timeout_s=timeout_s,
                )
            arrived = size
        except TransferError as error:
            _log.info("%s: the prefix could not be fetched, and is computed: %s", handle.owner, error)
        finally:
            self._bytes_per_s.add(arrived, time.monotonic() - began)
        return arrived == size

    async def close(self) -> None:
        """Close all channels; no fetch may be running."""
        await self._channels.close()
