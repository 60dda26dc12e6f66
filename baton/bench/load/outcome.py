"""The result of one request, as its client saw it."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from baton.bench.load.workload import Job


class Ending(StrEnum):
    """End of a request."""

    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"
    """The server refused at once because it has no room."""
    INTERRUPTED = "interrupted"
    """The end of the run ended the request."""


class RequestFailed(Exception):
    """A request that failed; `kind` is a short description that many failures share.

    `retry_after` is the number of seconds after which the server asks for another try, None if it does not say.
    """

    def __init__(
        self, kind: str, message: str = "", ending: Ending = Ending.FAILED, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.ending = ending
        self.retry_after = retry_after


@dataclass(slots=True)
class Outcome:
    """One request; times are seconds of `time.perf_counter`.

    `times` has one entry for each event with tokens, and `counts` the number of tokens in it, if the server reports it
    (else 1). `tokens` is the length of the output: as the server counts it, or the sum of `counts`. `input_tokens` is
    None for a text until the server has counted its tokens. `cached_tokens` is the number of input tokens from a cache,
    None if the server does not report it. `capped` is the time for which the request waited for `--max-concurrency`, in
    seconds.
    """

    due: float
    sent: float
    input_tokens: int | None
    capped: float = 0.0
    ended: float = 0.0
    ending: Ending = Ending.INTERRUPTED
    kind: str = ""
    message: str = ""
    tokens: int = 0
    cached_tokens: int | None = None
    times: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("I"))

    @classmethod
    def of(cls, job: Job, due: float, capped: float = 0.0) -> Outcome:
        """Start the record of a request that is being sent now."""
        known = None if isinstance(job.prompt, str) else len(job.prompt)
        return cls(due, time.perf_counter(), known, capped)

    def event(self, tokens: int = 1) -> None:
        """Record an event with `tokens` tokens."""
        self.times.append(time.perf_counter())
        self.counts.append(tokens)
        self.tokens += tokens

    @property
    def lateness(self) -> float:
        """Seconds from the time when it was due, and let through, until it was sent: the delay of the generator."""
        return self.sent - self.due - self.capped

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first event with tokens."""
        return self.times[0] - self.sent if self.times else None

    @property
    def gaps(self) -> list[float]:
        """ITL: seconds between successive events, whatever number of tokens they bring."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first event; None for outputs that came as one event.

        The usual formula divides by tokens - 1, because a first event has one token. A first event with several tokens
        is counted as one with several.
        """
        after = self.tokens - self.counts[0] if self.counts else 0
        return (self.times[-1] - self.times[0]) / after if len(self.times) > 1 and after > 0 else None

    def good(self, ttft_slo_s: float, itl_slo_s: float) -> bool:
        """Whether it finished within the objectives: time to the first token, and mean time between tokens."""
        if self.ending is not Ending.FINISHED or self.ttft is None or self.ttft > ttft_slo_s:
            return False
        return self.tpot is None or self.tpot <= itl_slo_s
