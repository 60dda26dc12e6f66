"""A request as the pipeline serves it: checked, tokenized, with seed and max_tokens set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.detokenizer import Detokenizer
from baton.request import CachePolicy, SamplingParams
from router.output.stops import StopStrings


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
