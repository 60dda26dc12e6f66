"""Answers of OpenAI's HTTP API, as events of a stream or as one JSON object.

    Update ── StreamEvents.of ── one event for each choice in it ── "data: {...}\\n\\n"
         └── WholeAnswer.add ── pieces of JSON by choice ── WholeAnswer.parts, when all prompts have ended

An update is small (`router.output`), so the JSON of one is made in a millisecond at most. The object of a whole answer
may be large. Its parts are made as the updates come, and the end only joins them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.errors import InvalidRequest
from baton.request import FinishReason, TokenInfo, Usage, pieces
from baton.tokenizer import Tokenizer
from router.output import ChoiceUpdate, Update
from router.request import Request
from router.serving.http_requests import AnswerOptions

MAX_ANSWER_BYTES = 64 << 20
"""Most bytes of an answer that is not streamed."""

PART_BYTES = 64 << 10
"""Bytes that are written to a client in one step."""

DONE = b"data: [DONE]\n\n"

_NO_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have; as in vLLM."""


class TokenTexts:
    """The texts of tokens in JSON, each made once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._vocabulary = tokenizer.vocabulary if tokenizer else None
        self._texts: dict[int, tuple[str, int]] = {}

    def quoted(self, token_id: int, *, as_id: bool = False) -> tuple[str, int]:
        """The token in JSON, and its number of characters; without a tokenizer, or `as_id`, it is "token_id:N"."""
        if as_id or self._vocabulary is None:
            text = f"token_id:{token_id}"
            return f'"{text}"', len(text)
        found = self._texts.get(token_id)
        if found is None:
            text = self._vocabulary.spelled(token_id).decode("utf-8", "replace")
            found = self._texts[token_id] = json.dumps(text), len(text)
        return found

    def bytes(self, token_id: int) -> str:
        """The bytes of a token, as a list in JSON."""
        return str(list(self._vocabulary.spelled(token_id))) if self._vocabulary else "null"


@dataclass(slots=True)
class UsageCounts:
    """Token counts of an answer, over all of its prompts."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add(self, usage: Usage, options: AnswerOptions) -> None:
        """Add the counts of a prompt that has ended."""
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_tokens
        self.completion += 0 if options.prompt_only else usage.completion_tokens

    def json(self) -> str:
        """The object `usage`."""
        return (
            f'{{"prompt_tokens":{self.prompt},"completion_tokens":{self.completion},'
            f'"total_tokens":{self.prompt + self.completion},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.cached}}}}}'
        )


@dataclass(slots=True)
class Envelope:
    """The beginning of all objects of an answer."""

    options: AnswerOptions
    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def begin(self) -> str:
        """The object up to the elements of `choices`."""
        kind = "chat.completion" if self.options.chat else "text_completion"
        if self.options.chat and self.options.stream:
            kind += ".chunk"
        prefix = "chatcmpl" if self.options.chat else "cmpl"
        return (
            f'{{"id":"{prefix}-{self.request_id}","object":"{kind}","created":{self.created},'
            f'"model":{json.dumps(self.model)},"choices":['
        )


class LogprobFields:
    """Log-probabilities of tokens in the form of an endpoint."""

    def __init__(self, options: AnswerOptions, texts: TokenTexts) -> None:
        self._options = options
        self._texts = texts
        self._names = ("content",) if options.chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def elements(self, tokens: Sequence[TokenInfo], offset: int) -> tuple[list[list[str]], int]:
        """The elements of each list for these tokens, and the offset in the text behind them."""
        lists: list[list[str]] = [[] for _ in self._names]
        for token in tokens:
            quoted, size = self._texts.quoted(token.token_id, as_id=self._options.tokens_as_ids)
            if self._options.chat:
                top = ",".join(f"{{{self._entry(*each)}}}" for each in token.top[: self._options.logprobs])
                entry = self._entry(token.token_id, token.logprob if token.logprob is not None else _NO_LOGPROB)
                lists[0].append(f'{{{entry},"top_logprobs":[{top}]}}')
                continue
            lists[0].append(quoted)
            lists[1].append("null" if token.logprob is None else _number(token.logprob))
            lists[2].append(self._most_likely(token, quoted))
            lists[3].append(str(offset))
            offset += size
        return lists, offset

    def object(self, lists: Iterable[Sequence[str]]) -> str:
        """The object with these elements."""
        named = zip(self._names, lists, strict=True)
        return "{" + ",".join(f'"{name}":[{",".join(elements)}]' for name, elements in named) + "}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the lists."""
        return self._names

    def of_prompt(self, tokens: Sequence[TokenInfo]) -> list[str]:
        """The elements of vLLM's `prompt_logprobs` for these tokens."""
        return ["null" if token.logprob is None else self._by_id(token, token.logprob) for token in tokens]

    def _by_id(self, token: TokenInfo, logprob: float) -> str:
        entries = {token.token_id: (logprob, 0)}
        entries |= {token_id: (each, rank) for rank, (token_id, each) in enumerate(token.top, 1)}
        return (
            "{"
            + ",".join(
                f'"{token_id}":{{"logprob":{_number(each)},"rank":{rank or "null"},'
                f'"decoded_token":{self._texts.quoted(token_id)[0]}}}'
                for token_id, (each, rank) in entries.items()
            )
            + "}"
        )

    def _entry(self, token_id: int, logprob: float) -> str:
        quoted, _ = self._texts.quoted(token_id, as_id=self._options.tokens_as_ids)
        return f'"token":{quoted},"logprob":{_number(logprob)},"bytes":{self._texts.bytes(token_id)}'

    def _most_likely(self, token: TokenInfo, quoted: str) -> str:
        """The alternatives by their texts, and the token itself; of equal texts the most likely one."""
        if token.logprob is None:
            return "null"
        found: dict[str, float] = {}
        for token_id, logprob in token.top[: self._options.logprobs]:
            found.setdefault(self._texts.quoted(token_id, as_id=self._options.tokens_as_ids)[0], logprob)
        found.setdefault(quoted, token.logprob)
        return "{" + ",".join(f"{text}:{_number(logprob)}" for text, logprob in found.items()) + "}"


class StreamEvents:
    """The events of the stream of one prompt."""

    def __init__(
        self, envelope: Envelope, texts: TokenTexts, request: Request, prompt: int, echoed: str | None
    ) -> None:
        """`prompt` is the index of the prompt in the request; `echoed` its text, if choices begin with it."""
        self._options = options = envelope.options
        self._begin = f'data: {envelope.begin()}{{"index":'
        self._logprobs = LogprobFields(options, texts)
        self._request = request
        self._first = prompt * options.n
        self._echoed = echoed
        self._begun: set[int] = set()
        self._offsets = dict.fromkeys(range(options.n), 0)
        self._counts = UsageCounts(prompt=len(request.prompt_ids))

    def of(self, update: Update) -> bytes:
        """The events of an update, which may be none."""
        events = []
        if self._options.echo and self._options.logprobs is not None and update.prompt_tokens:
            events += [self._echo(choice, update.prompt_tokens) for choice in range(self._options.n)]
        for delta in update.deltas.values():
            more = ""
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                more = "" if self._options.chat else self._prompt_ids()
                if self._options.chat:
                    events.append(self._role(delta.index))
                elif self._echoed is not None:
                    events.append(self._event(delta.index, self._echoed, "null", [], None, None, more))
                    more = ""
            if not self._options.prompt_only:
                events.append(self._delta(delta, more))
            elif delta.finish is not None:
                events.append(self._event(delta.index, "", "null", [], "length", None, more))
        return "".join(events).encode()

    def _role(self, choice: int) -> str:
        """The event before the first output of a choice of a chat."""
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return f"{self._begin}{self._first + choice},{role}{self._prompt_ids()}}}]{self._usage()}}}\n\n"

    def _prompt_ids(self) -> str:
        if not self._options.token_ids:
            return ""
        parts = (",".join(map(str, piece)) for piece in pieces(self._request.prompt_ids))
        return f',"prompt_token_ids":[{",".join(parts)}]'

    def _echo(self, choice: int, tokens: Sequence[TokenInfo]) -> str:
        """An event with log-probabilities of the prompt; the first one has its text."""
        lists, self._offsets[choice] = self._logprobs.elements(tokens, self._offsets[choice])
        begins = choice not in self._begun
        self._begun.add(choice)
        text, more = (self._echoed or "", self._prompt_ids()) if begins else ("", "")
        return self._event(choice, text, self._logprobs.object(lists), [], None, None, more)

    def _delta(self, delta: ChoiceUpdate, more: str) -> str:
        self._counts.completion += len(delta.tokens)
        finish = delta.finish.value if delta.finish is not None else None
        reason = stop_reason(delta, self._options) if finish else None
        logprobs = "null"
        if self._options.logprobs is not None:
            lists, self._offsets[delta.index] = self._logprobs.elements(delta.tokens, self._offsets[delta.index])
            logprobs = self._logprobs.object(lists)
        return self._event(delta.index, delta.text, logprobs, delta.tokens, finish, reason, more)

    def _event(
        self,
        choice: int,
        text: str,
        logprobs: str,
        tokens: Sequence[TokenInfo],
        finish: str | None,
        reason: str | None,
        more: str = "",
    ) -> str:
        content = f'"delta":{{"content":{json.dumps(text)}}}' if self._options.chat else f'"text":{json.dumps(text)}'
        ended = f'"{finish}","stop_reason":{reason or "null"}' if finish else "null"
        if self._options.token_ids:
            more += f',"token_ids":[{",".join(str(token.token_id) for token in tokens)}]'
        return (
            f'{self._begin}{self._first + choice},{content},"logprobs":{logprobs},"finish_reason":{ended}{more}}}]'
            f"{self._usage()}}}\n\n"
        )

    def _usage(self) -> str:
        if self._options.continuous_usage:
            return f',"usage":{self._counts.json()}'
        return ',"usage":null' if self._options.include_usage else ""


def usage_event(envelope: Envelope, counts: UsageCounts) -> bytes:
    """The event with the counts of a whole stream, which has no choices."""
    return f'data: {envelope.begin()}],"usage":{counts.json()}}}\n\n'.encode()


@dataclass(slots=True)
class _Choice:
    """Parts of the JSON of one choice."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    offset: int = 0
    finish: FinishReason | None = None
    reason: str | None = None


class WholeAnswer:
    """The answer of all prompts of a request, as one JSON object."""

    def __init__(self, options: AnswerOptions, texts: TokenTexts) -> None:
        self._options = options
        self._logprobs = LogprobFields(options, texts)
        self._choices: dict[int, _Choice] = {}
        self._prompts: dict[int, tuple[Request, list[str]]] = {}
        self._bytes = 0
        self.counts = UsageCounts()

    def begin(self, prompt: int, request: Request, echoed: str | None) -> None:
        """Add a prompt by its index; `echoed` is its text, if choices begin with it."""
        self._prompts[prompt] = request, []
        for choice in range(self._options.n):
            made = self._choices[prompt * self._options.n + choice] = _Choice()
            made.logprobs = [[] for _ in self._logprobs.names]
            made.texts += _quoted(echoed or "")

    def add(self, prompt: int, update: Update) -> None:
        """Add an update of a prompt. Raises InvalidRequest if the answer becomes too large."""
        options, first = self._options, prompt * self._options.n
        if update.prompt_tokens:
            if options.prompt_logprobs:
                self._keep(self._prompts[prompt][1], self._logprobs.of_prompt(update.prompt_tokens))
            if options.echo and options.logprobs is not None:
                for choice in range(options.n):
                    self._add_logprobs(self._choices[first + choice], update.prompt_tokens)
        for delta in update.deltas.values():
            choice_ = self._choices[first + delta.index]
            if delta.finish is not None:
                choice_.finish, choice_.reason = delta.finish, stop_reason(delta, options)
            if options.prompt_only:
                choice_.finish, choice_.reason = FinishReason.LENGTH, None
                continue
            self._keep(choice_.texts, [json.dumps(delta.text)[1:-1]])
            if options.token_ids:
                self._keep(choice_.ids, [str(token.token_id) for token in delta.tokens])
            if options.logprobs is not None:
                self._add_logprobs(choice_, delta.tokens)
        if update.usage is not None:
            self.counts.add(update.usage, options)

    def parts(self, envelope: Envelope) -> Iterator[bytes]:
        """The object, in parts of about PART_BYTES."""
        waiting, size = list[str](), 0
        for text in self._texts(envelope):
            waiting.append(text)
            size += len(text)
            if size >= PART_BYTES:
                yield "".join(waiting).encode()
                waiting, size = [], 0
        yield "".join(waiting).encode()

    def _add_logprobs(self, choice: _Choice, tokens: Sequence[TokenInfo]) -> None:
        lists, choice.offset = self._logprobs.elements(tokens, choice.offset)
        for kept, elements in zip(choice.logprobs, lists, strict=True):
            self._keep(kept, elements)

    def _keep(self, kept: list[str], elements: Sequence[str]) -> None:
        kept += elements
        self._bytes += sum(map(len, elements))
        if self._bytes > MAX_ANSWER_BYTES:
            problem = f"the answer has more than {MAX_ANSWER_BYTES} bytes, which only a stream may have"
            raise InvalidRequest("stream", problem, False)

    def _texts(self, envelope: Envelope) -> Iterator[str]:
        yield envelope.begin()
        for index, choice in sorted(self._choices.items()):
            request, of_prompt = self._prompts[index // self._options.n]
            yield f'{"," if index else ""}{{"index":{index},'
            yield '"message":{"role":"assistant","content":"' if self._options.chat else '"text":"'
            yield from choice.texts
            yield '","refusal":null},"logprobs":' if self._options.chat else '","logprobs":'
            if self._options.logprobs is None:
                yield "null"
            else:
                yield from _members(zip(self._logprobs.names, choice.logprobs, strict=True))
            yield f',"finish_reason":"{(choice.finish or FinishReason.LENGTH).value}"'
            yield f',"stop_reason":{choice.reason or "null"}'
            if self._options.token_ids:
                yield from _list(',"token_ids":', choice.ids)
                if not self._options.chat:
                    yield from _id_list(request.prompt_ids)
            if not self._options.chat:
                yield from _list(',"prompt_logprobs":', of_prompt if self._options.prompt_logprobs else None)
            yield "}"
        yield f'],"usage":{self.counts.json()}'
        if self._options.chat:
            ((request, of_prompt),) = self._prompts.values()
            yield from _list(',"prompt_logprobs":', of_prompt if self._options.prompt_logprobs else None)
            if self._options.token_ids:
                yield from _id_list(request.prompt_ids)
        yield "}"


def stop_reason(delta: ChoiceUpdate, options: AnswerOptions) -> str | None:
    """The stop string or the requested stop token that ended a choice, in JSON; None for all other ends."""
    if delta.stop_string is not None:
        return json.dumps(delta.stop_string)
    return str(delta.stop_token_id) if delta.stop_token_id in options.stop_token_ids else None


def joined_ids(ids: Sequence[int]) -> Iterator[str]:
    """Elements of a list in JSON, in pieces."""
    for index, piece in enumerate(pieces(ids)):
        yield f"{',' if index else ''}{','.join(map(str, piece))}"


def quoted(text: str) -> Iterator[str]:
    """A text in JSON, in pieces."""
    yield '"'
    yield from _quoted(text)
    yield '"'


def _quoted(text: str) -> Iterator[str]:
    return (json.dumps(text[start : start + PART_BYTES])[1:-1] for start in range(0, len(text), PART_BYTES))


def _members(lists: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    for index, (name, elements) in enumerate(lists):
        yield from _list(f'{"," if index else "{"}"{name}":', elements)
    yield "}"


def _list(name: str, elements: Sequence[str] | None) -> Iterator[str]:
    if elements is None:
        yield f"{name}null"
        return
    yield f"{name}["
    for index, element in enumerate(elements):
        yield f",{element}" if index else element
    yield "]"


def _id_list(ids: Sequence[int]) -> Iterator[str]:
    yield ',"prompt_token_ids":['
    yield from joined_ids(ids)
    yield "]"


def _number(logprob: float) -> str:
    return repr(max(logprob, _NO_LOGPROB))


def error_object(
    message: str, kind: str, param: str | None, code: str | None
) -> Mapping[str, Mapping[str, str | None]]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
