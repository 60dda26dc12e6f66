"""Which prompt is computed next, and how much of it. Pure, without even a clock of its own.

    admit ──▶ LOOKUP ──await_pages──▶ WAITING ──allocate──▶ LOADING ──make_ready──▶ READY ⇄ COMPUTING ──▶ remove
              (prefix cache)          (for pages)           (cached blocks)         (a chunk at a time)

The scheduler returns decisions and calls nobody: `next_allocation` names the prompt to allocate pages for, `next_chunk`
the chunk to compute; the caller does it, and says how it went.

What is cached of a prompt is known twice: when it was looked up, and, since it may have grown or shrunk meanwhile, when
its pages are allocated (`expect`). A prompt that does best to wait for another one, because that one computes much of
its prefix, is `deferred`: the caller names these.

Tenants share the engine by weighted fair queueing with equal weights (Demers, Keshav and Shenker, 1989): at each chunk
boundary the prompt goes next that would finish first if all tenants with prompts here were served at the same time, at
the same rate. So neither many prompts of a tenant nor a long one delay the prompt of another tenant by more than a
chunk and that tenant's own share. A tenant that has had no prompt here begins with as much service as the least served.

Among the prompts of one tenant the READY one with the fewest tokens left goes next, so that a short prompt does not
wait for a long one. So that nothing starves, being overtaken earns credit: a tenth of the tokens that the worker
computes meanwhile for prompts of the tenant that came later. Later prompts thus hold up a prompt for at most about ten
times as long as it takes. Waiting for earlier ones earns nothing, or a queue of long prompts would soon go before every
short one.

Pages are allocated in the same order, all that a prompt needs at once, and only to the first PREPARED_AHEAD
prompts that have not begun, since pages held by a prompt that does not run serve nobody. A prompt whose pages
are not free is passed over by those that fit, until it was refused for PATIENCE_S; from then on no other gets
pages before it.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from baton.engine.contract import EngineSpec
from baton.errors import InvalidRequest, Overloaded
from baton.rates import DecayingRate

AGEING = 0.1
PREPARED_AHEAD = 2
PATIENCE_S = 2.0
CHUNK_S = 0.5
LEAST_CHUNK = 256
LEAST_CHUNK_S = 5.0
UNKNOWN_RATE = 1000.0
TELLING_TOKENS = 64
_CHUNK_SIZES = ((512_000, 4_096), (128_000, 8_192), (32_000, 16_384))
_RETRY_AFTER_S = (0.1, 60.0)


def chunk_size(prompt_tokens: int, configured: int, rate: float) -> int:
    """Tokens of the next chunk of a prompt; `rate` in tokens/s, 0 while unknown.

    As configured, or by the length: whole below 32,000 tokens, then 16,384, 8,192 from 128,000 and 4,096 from
    512,000 on; and not more than the measured rate, or UNKNOWN_RATE, computes in CHUNK_S, so that a layer is over
    long before a worker is held to be wedged. Yet LEAST_CHUNK tokens, which use a processor better than fewer do,
    unless these would take longer than LEAST_CHUNK_S; and never fewer than tell the rate, so that after a slow spell
    it is found out that the spell is over.
    """
    if configured:
        return configured
    size = next((size for least, size in _CHUNK_SIZES if prompt_tokens >= least), prompt_tokens)
    rate = rate or UNKNOWN_RATE
    least = max(TELLING_TOKENS, min(LEAST_CHUNK, int(rate * LEAST_CHUNK_S)))
    return min(size, max(least, int(rate * CHUNK_S)))


class Stage(enum.Enum):
    """Where a prompt is on its way."""

    LOOKUP = "lookup"
    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    COMPUTING = "computing"


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt as the scheduler sees it.

    `done` tokens are computed, or found in a cache and expected to load. `overtaken_s` is for how long later prompts of
    the tenant were computed meanwhile. Times are in seconds.
    """

    tokens: int
    pages: int
    admitted_at: float
    order: int
    tenant: bytes = b""
    stage: Stage = Stage.LOOKUP
    done: int = 0
    begun: bool = False
    overtaken_s: float = 0.0
    refused_at: float | None = None

    @property
    def left(self) -> int:
        """Tokens still to be computed."""
        return self.tokens - self.done


@dataclass(slots=True)
class Scheduler:
    """All prompts of one worker from admission to end; times are given by the caller, from one clock."""

    spec: EngineSpec
    chunk_size: int
    max_waiting: int
    rate: DecayingRate = field(default_factory=DecayingRate)
    _prompts: dict[Prompt, None] = field(default_factory=dict)
    _orders: itertools.count[int] = field(default_factory=itertools.count)
    _served_s: dict[bytes, float] = field(default_factory=dict)
    """For how long the engine has served each tenant that has prompts here, on the scale that they share."""

    @property
    def waiting(self) -> int:
        """Prompts without a computed chunk."""
        return sum(not prompt.begun for prompt in self._prompts)

    @property
    def running(self) -> int:
        """Prompts with a computed chunk."""
        return sum(prompt.begun for prompt in self._prompts)

    @property
    def pending_tokens(self) -> int:
        """Tokens to be computed for all prompts."""
        return sum(prompt.left for prompt in self._prompts)

    def admit(self, tokens: int, now: float, tenant: bytes = b"") -> Prompt:
        """Take in a prompt of `tenant`.

        Raises InvalidRequest if it can never be computed here, Overloaded if too many wait.
        """
        if tokens >= self.spec.max_model_len:
            raise InvalidRequest(
                "prompt_token_ids",
                f"with output_token_ids must leave room for a token in {self.spec.max_model_len}",
                tokens,
            )
        pages = self.spec.pages_for(tokens)
        if pages > self.spec.pages:
            raise InvalidRequest(
                "prompt_token_ids",
                f"with output_token_ids need {pages} pages, the prefill worker's KV memory has {self.spec.pages}, "
                f"which hold {self.spec.pages * self.spec.page_size} tokens (--kv-memory)",
                tokens,
            )
        if self.waiting >= self.max_waiting:
            seconds = self.pending_tokens / (self.rate.value or UNKNOWN_RATE)
            low, high = _RETRY_AFTER_S
            raise Overloaded(
                f"{self.waiting} prompts wait, at most {self.max_waiting} may", min(high, max(low, seconds))
            )
        prompt = Prompt(tokens, pages, now, next(self._orders), tenant)
        self._prompts[prompt] = None
        self._served_s.setdefault(tenant, min(self._served_s.values(), default=0.0))
        return prompt

    def await_pages(self, prompt: Prompt, cached: int) -> None:
        """The look-up is over: so many leading tokens are expected from the cache."""
        prompt.done, prompt.stage = cached, Stage.WAITING

    def next_allocation(
        self, now: float, deferred: Collection[Prompt] = (), refused: Collection[Prompt] = ()
    ) -> Prompt | None:
        """The WAITING prompt to allocate pages for; None if no other may have pages before those that have them.

        `deferred` prompts wait for what another computes. `refused` ones were tried in this round, and their pages are
        not free.
        """
        prepared = 0
        for prompt in self._allocation_order(now, deferred):
            if prompt.stage is not Stage.WAITING:
                prepared += 1
                if prepared == PREPARED_AHEAD:
                    return None
            elif prompt not in deferred and prompt not in refused:
                return prompt
        return None

    def waiting_for_pages(self) -> list[Prompt]:
        """All WAITING prompts."""
        return [prompt for prompt in self._prompts if prompt.stage is Stage.WAITING]

    def allocate(self, prompt: Prompt, cached: int) -> None:
        """The prompt has its pages; so many leading tokens are in them, or on their way there."""
        prompt.stage = Stage.LOADING
        self.expect(prompt, cached)

    def refuse(self, prompt: Prompt, now: float) -> None:
        """The prompt's pages are not free."""
        if prompt.refused_at is None:
            prompt.refused_at = now

    def expect(self, prompt: Prompt, cached: int) -> None:
        """So many leading tokens are in its pages, or on their way there."""
        prompt.done = cached

    def make_ready(self, prompt: Prompt, done: int) -> None:
        """The KV of the first `done` tokens is in place; the next chunk may be computed."""
        prompt.done, prompt.stage = done, Stage.READY

    def next_chunk(self) -> tuple[Prompt, int] | None:
        """The prompt to compute next and the end of its chunk; None if none is READY."""
        ready = [prompt for prompt in self._prompts if prompt.stage is Stage.READY]
        if not ready:
            return None
        prompt = self._in_order(ready)[0]
        size = chunk_size(prompt.tokens, self.chunk_size, self.rate.value)
        return prompt, min(prompt.tokens, prompt.done + size)

    def start_chunk(self, prompt: Prompt) -> None:
        """A chunk of the prompt is being computed."""
        prompt.stage = Stage.COMPUTING

    def finish_chunk(self, prompt: Prompt, end: int, seconds: float) -> None:
        """A chunk up to `end` took so long.

        One of fewer than TELLING_TOKENS is mostly overhead, unless all are that short: it may raise the known
        rate, but neither lower nor establish it. Or short prompts and rests of cached ones would make the worker
        seem slow.
        """
        tokens = end - prompt.done
        telling = tokens >= min(self.chunk_size or TELLING_TOKENS, TELLING_TOKENS)
        if telling or 0 < self.rate.value * seconds < tokens:
            self.rate.add(tokens, seconds)
        prompt.done, prompt.begun = end, True

    def charge(self, prompt: Prompt, seconds: float) -> None:
        """The engine was the prompt's for so long, whatever came of it: those that it has overtaken earn credit."""
        self._served_s[prompt.tenant] += seconds
        for other in self._prompts:
            if other.tenant == prompt.tenant and other.order < prompt.order:
                other.overtaken_s += seconds

    def rank(self, prompt: Prompt) -> float:
        """Tokens that it has left, less the credit for being overtaken: the least of a tenant goes first."""
        return prompt.left - AGEING * (self.rate.value or UNKNOWN_RATE) * prompt.overtaken_s

    def remove(self, prompt: Prompt) -> None:
        """The prompt is finished or given up."""
        self._prompts.pop(prompt, None)
        if all(other.tenant != prompt.tenant for other in self._prompts):
            self._served_s.pop(prompt.tenant, None)

    def _allocation_order(self, now: float, deferred: Collection[Prompt]) -> list[Prompt]:
        """Prompts that have not begun and know their hit; one that has lost patience stands alone."""
        prompts = [prompt for prompt in self._prompts if not prompt.begun and prompt.stage is not Stage.LOOKUP]
        starved = [
            prompt
            for prompt in prompts
            if prompt.stage is Stage.WAITING
            and prompt.refused_at is not None
            and now - prompt.refused_at >= PATIENCE_S
            and prompt not in deferred
        ]
        return sorted(starved, key=lambda prompt: prompt.order)[:1] or self._in_order(prompts)

    def _in_order(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """By the virtual time at which each would finish, were its tenant served all the while."""
        finish_s, rate = dict(self._served_s), self.rate.value or UNKNOWN_RATE
        keyed: list[tuple[float, int, Prompt]] = []
        for prompt in sorted(prompts, key=lambda prompt: (self.rank(prompt), prompt.order)):
            finish_s[prompt.tenant] += prompt.left / rate
            keyed.append((finish_s[prompt.tenant], len(keyed), prompt))
        return [prompt for *_, prompt in sorted(keyed, key=lambda each: each[:2])]
