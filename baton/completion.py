"""Types of the client: prompts, deltas, completions; plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.request import CachePolicy, FinishReason, PrefillProgress, Timings, TokenInfo, Usage

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Messages
Cache = CachePolicy | str
"""A request's use of the prefix cache: a policy, or its value: "read_write", "read", "write" or "off"."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of choice `index`; `usage` and `timings_ms` come with the last delta of the stream.

    `stop` is the stop string or stop token that ended the choice. `prompt_tokens` comes only if `prompt_logprobs` was
    asked for: before all other tokens, and in parts if the prompt is long. `progress` comes only if `report_progress`
    was set: before all else, and alone. It may go back, if another worker begins the prompt again.
    """

    request_id: str
    index: int
    text: str = ""
    tokens: tuple[TokenInfo, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    prompt_tokens: tuple[TokenInfo, ...] = ()
    progress: PrefillProgress | None = None
    usage: Usage | None = None
    timings_ms: Timings | None = None


@dataclass(slots=True)
class Choice:
    """One completion; `logprobs` has an entry for each token, None unless they were asked for."""

    index: int
    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens' ids."""
        return [token.token_id for token in self.tokens]

    @property
    def logprobs(self) -> list[TokenInfo] | None:
        """The tokens with their log-probabilities."""
        return self.tokens if any(token.logprob is not None for token in self.tokens) else None


@dataclass(slots=True)
class Completion:
    """A finished request; properties like `text` are those of its first choice."""

    request_id: str = ""
    choices: list[Choice] = field(default_factory=list)
    prompt_tokens: list[TokenInfo] = field(default_factory=list)
    usage: Usage | None = None
    timings_ms: Timings | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason for the end of the first choice."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenInfo] | None:
        """Log-probabilities of the first choice."""
        return self.choices[0].logprobs

    def add(self, delta: Delta) -> None:
        """Add one delta of the stream."""
        self.request_id = delta.request_id
        while len(self.choices) <= delta.index:
            self.choices.append(Choice(len(self.choices)))
        choice = self.choices[delta.index]
        choice.text += delta.text
        choice.tokens.extend(delta.tokens)
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.stop = choice.stop if delta.stop is None else delta.stop
        self.prompt_tokens.extend(delta.prompt_tokens)
        self.usage = delta.usage or self.usage
        self.timings_ms = delta.timings_ms or self.timings_ms


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers of one role, "prefill", "decode" or "mixed", that have the same degrees of parallelism."""

    role: str
    workers: int
    tensor_parallel: int
    pipeline_parallel: int


@dataclass(frozen=True, slots=True)
class Model:
    """The served model; `workers` are those that the router uses."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    fingerprint: str
    workers: tuple[WorkerGroup, ...]
