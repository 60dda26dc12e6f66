"""Detects a worker that computes wrong values, by requests that get no token."""

from __future__ import annotations

from baton.errors import EngineError

LIMIT = 3


class FaultCounter:
    """The latest requests for which no token could be computed.

    If the logits of one request are not finite, the request is the cause, however often it comes. If this happens to
    LIMIT different requests without a good token of any request between them, the worker has bad weights or bad memory.
    """

    def __init__(self) -> None:
        self._requests: set[str] = set()

    def record_success(self) -> None:
        """Record that a token was computed."""
        self._requests.clear()

    def record_failure(self, request_id: str) -> None:
        """Record that no token could be computed for this request.

        Raises EngineError after LIMIT different requests.
        """
        self._requests.add(request_id)
        if len(self._requests) >= LIMIT:
            raise EngineError(
                f"{LIMIT} different requests got no token, with no good token between them: {sorted(self._requests)}"
            )
