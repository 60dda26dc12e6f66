"""Finds out whether a worker computes wrong values, when requests get no token.

If the logits of a request are not finite, its input may be the cause, or the worker: bad weights, bad memory. When
LIMIT different requests got no token, and no request between them got one, the worker computes tokens for a prompt of
its own. If it gets them, the requests were the cause. If not, the worker is.
"""

from __future__ import annotations

import logging

from baton.engine.contract import Engine, PromptChunk, compute_chunk
from baton.engine.sequence import Sequence
from baton.errors import EngineError, NoToken, OutOfPages
from baton.request import SamplingParams, SequenceState
from baton.worker.progress import Progress

LIMIT = 3
SELF_TEST = "self-test"
"""The owner of the pages that the worker's own prompt uses."""

_PROMPT_TOKENS = 16

_log = logging.getLogger(__name__)


class FaultCounter:
    """The latest requests for which no token could be computed."""

    def __init__(self) -> None:
        self._requests: set[str] = set()

    @property
    def suspected(self) -> bool:
        """Whether LIMIT different requests have failed since the last token. `check_engine` must say why."""
        return len(self._requests) >= LIMIT

    def record_success(self) -> None:
        """Record that a token was computed."""
        self._requests.clear()

    def record_failure(self, request_id: str) -> None:
        """Record that no token could be computed for this request."""
        self._requests.add(request_id)

    def check_engine(self, engine: Engine, progress: Progress, *, step: bool) -> None:
        """Compute a token for a prompt of the worker's own, and another one by a `step`, then count anew.

        Call it on the engine thread; for a `step`, with an empty batch. Raises EngineError if there is no token. If no
        page is free, nothing is found out.
        """
        requests = sorted(self._requests)
        self._requests.clear()
        try:
            _compute_own(engine, progress, step=step)
        except OutOfPages as error:
            _log.warning("%s got no token, and the worker can't be tested: %s", ", ".join(requests), error)
        except Exception as error:
            raise EngineError(
                f"{len(requests)} different requests got no token, with no good token between them, and neither did "
                f"the worker's own prompt ({error}): {requests}"
            ) from error
        else:
            _log.warning("%s got no token; the worker's own prompt did, so they are the cause", ", ".join(requests))


def _compute_own(engine: Engine, progress: Progress, *, step: bool) -> None:
    spec, greedy = engine.spec, SamplingParams(temperature=0.0)
    ids = tuple(range(min(_PROMPT_TOKENS, spec.vocab_size, max(1, spec.max_model_len - 2))))
    handle = engine.reserve(SELF_TEST, len(ids) + 1)
    try:
        prompt = SequenceState(greedy, ids)
        chunk = PromptChunk(handle, ids, 0, len(ids), lambda _: progress.record(), (prompt,))
        result = compute_chunk(engine, chunk)
        if step:
            engine.insert(Sequence(handle, SequenceState(greedy, ids, (result.tokens[0].token_id,))))
            for _, found in engine.launch().result().steps:
                if isinstance(found, NoToken):
                    raise found
    finally:
        engine.free(handle)
