"""What attempts have pinned, exported for the prefill workers that have to compute the rest.

The pinned tokens are final, so their export is committed as soon as it is opened, and hands nothing over. It ends when
prefill releases it, with its lease, when the attempt has been handed over, or with the attempt. The pages are the
attempt's own: the export holds nothing, and the handle may be freed as soon as it has ended.
"""

from __future__ import annotations

import logging

from baton.errors import BatonError
from baton.telemetry import metrics
from baton.transfer.export import Export
from baton.transfer.exports import Exports
from decode_svc.attempt import Attempt
from decode_svc.reservation import pinnable

_log = logging.getLogger(__name__)


class PrefixExports:
    """At most one export for each attempt; lives on the asyncio loop."""

    def __init__(self, exports: Exports, block_size: int) -> None:
        self._exports = exports
        self._block_size = block_size
        self._of: dict[Attempt, Export] = {}

    def __len__(self) -> int:
        return len(self._of)

    def begin(self, attempt: Attempt, transfer_id: str) -> None:
        """Let prefill fetch what the attempt has pinned. Without it prefill computes: a failure here fails nothing."""
        tokens = attempt.handle.cached
        if not tokens:
            # A fetch that is here already, or on its way, need not wait for what never comes.
            self._exports.release(transfer_id, self._exports.incarnation, "has nothing to export")
            return

        def closed() -> None:
            del self._of[attempt]

        try:
            export = self._exports.open(transfer_id, attempt.handle, tokens, on_closed=closed)
        except BatonError as error:
            _log.warning("%s: its prefix can't be exported: %s", attempt.key, error)
            return
        self._of[attempt] = export
        export.commit_prefix(pinnable(attempt.request)[tokens // self._block_size - 1])
        metrics.PREFIX_EXPORTS.inc()

    def end(self, attempt: Attempt) -> None:
        """The attempt was handed over, or ends: its export, if there is one, ends before the handle does."""
        if (export := self._of.get(attempt)) is not None:
            export.end("ended with its attempt")

    async def close(self) -> None:
        """End all exports, and return when nothing is being read."""
        self._exports.close()
        await self._exports.drained()
