"""When requests without a token mean that the worker itself computes wrong."""

from __future__ import annotations

from baton.errors import EngineError

LIMIT = 3


class Faults:
    """Requests that no token could be computed for, in succession.

    One request whose logits are not finite is that request's fault, as often as it comes. LIMIT different ones, without
    a single good token of anybody between them, are the worker's: bad weights or bad memory.
    """

    def __init__(self) -> None:
        self._requests: set[str] = set()

    def computed(self) -> None:
        """A token was computed."""
        self._requests.clear()

    def failed(self, request_id: str) -> None:
        """None could be computed for this request. Raises EngineError when that makes too many."""
        self._requests.add(request_id)
        if len(self._requests) >= LIMIT:
            raise EngineError(
                f"{LIMIT} requests in succession got no token, and nobody did between them: {sorted(self._requests)}"
            )
