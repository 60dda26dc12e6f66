"""A request as the request runner serves it, and what happens to its attempts, in plain Python.

A request is checked and tokenized, with seed and max_tokens set. Prefill call and decode session deliver events into an
attempt's one inbox, which need not care which of the two was first.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.errors import BatonError
from baton.request import (
    CachePolicy,
    Output,
    Prefilled,
    PrefillProgress,
    PromptReport,
    SamplingParams,
)
from router.workers.failures import WorkerLoss

if TYPE_CHECKING:
    from baton.tokenizer import Detokenizer


class StopStrings:
    """The automaton of some stop strings (Aho and Corasick, 1975); choices of a request share it.

    It reads a text character by character, so what it finds does not depend on how the text was cut into pieces, and
    the work per character depends neither on the number of stop strings nor on their length. The match that ends first
    wins; of two that end together, the longer.

    A node stands for a prefix of a stop string: the longest one that the text read so far ends with. Node 0 is empty.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """By node: the node of the next shorter prefix that it ends with."""
        self.match = [0]
        """By node: characters of the longest stop string that it ends with; 0 if there is none."""
        self.hold = [0]
        """By node: characters at its end that a stop string could begin with."""
        for stop in stops:
            self._add(stop)
        self._link()
        self._first = frozenset(self._next[0])

    def misses(self, text: str) -> bool:
        """Whether no stop string begins anywhere in the text."""
        return self._first.isdisjoint(text)

    def advance(self, node: int, char: str) -> int:
        """The node after one more character."""
        while (found := self._next[node].get(char)) is None:
            if not node:
                return 0
            node = self._shorter[node]
        return found

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self.match.append(0)
            node = self._next[node][char]
        self.match[node] = len(stop)

    def _link(self) -> None:
        """Set what follows from shorter prefixes, which come first."""
        depth = [0] * len(self._next)
        self._shorter, self.hold = [0] * len(self._next), [0] * len(self._next)
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for char, longer in self._next[node].items():
                depth[longer] = depth[node] + 1
                shorter = self.advance(self._shorter[node], char) if node else 0
                self._shorter[longer] = shorter
                self.match[longer] = self.match[longer] or self.match[shorter]
                self.hold[longer] = depth[longer] if self._next[longer] else self.hold[shorter]
                waiting.append(longer)


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `arrived` and `deadline` are on the event loop's clock, `tenant` is "" for the only one.

    `salt` is at the root of its prefix chain.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    arrived: float
    deadline: float | None = None
    tenant: str = ""
    stops: StopStrings = field(default_factory=StopStrings)
    cache: CachePolicy = CachePolicy.READ_WRITE
    salt: bytes = b""
    report_progress: bool = False
    detokenizer: Callable[[], Detokenizer] = field(default=lambda: NoText())

    @property
    def reads_cache(self) -> bool:
        """Whether cached KV may be used; what is asked of every position of a prompt needs all of it computed."""
        return self.cache.reads and self.params.prompt_logprobs is None


class NoText:
    """The detokenizer of a model without a tokenizer: token ids are all there is."""

    def push(self, token_id: int) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


class Blame(enum.Enum):
    """The part of an attempt that has a fault."""

    PREFILL = "prefill"
    DECODE = "decode"
    PAIR = "pair"


class Cause(enum.Enum):
    """The kind of a failure; only a fault counts against the part that has it."""

    FAULT = "fault"
    LOST = "lost"
    """The connection with the worker was lost: its watch or session broke or fell silent, or the worker said that it
    makes no progress. Whether the worker died is seen later."""
    DRAIN = "drain"
    PREEMPTED = "preempted"
    """The worker ran out of memory for the sequence; nothing is wrong with it."""
    REFUSED = "refused"
    """The worker was full."""


class Suspicion(enum.IntEnum):
    """The workers that a request is suspected of killing, and so must have for itself."""

    NONE = 0
    PREFILL = 1
    """Deaths of workers point at it, but too few of decode workers."""
    DECODE = 2
    """Deaths of decode workers alone suffice; it has a prefill worker for itself as well."""


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """The decode worker holds nothing of the attempt any more, and nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt can't go on."""

    error: BatonError
    blame: Blame
    cause: Cause = Cause.FAULT
    loss: WorkerLoss | None = None
    """The lost connection, if the request is one of its suspects."""


Event = PrefillProgress | PromptReport | Prefilled | Output | DecodeEnded | Failed
Deliver = Callable[[Event], None]
