"""Any server with OpenAI's `/v1/completions`: vLLM, llama.cpp and others.

aiohttp reads the stream: of all maintained clients it needs the least time for an event, so that the generator does
not limit the measurement.

The number of tokens in an event is that of its `token_ids`, which vLLM sends if `return_token_ids` asks for them; else
it is one. The length of the output is in the `usage` of the last event; else it is the requested length, if the server
says that it ended by `length`; else the sum over the events.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from baton.bench.load.outcome import Ending, Outcome, RequestFailed
from baton.bench.load.targets import Endpoint
from baton.bench.load.workload import Job
from baton.errors import ConfigError, preview

KEEP_ALIVE_S = 2.0
"""Seconds for which an idle connection is kept: less than servers keep it (uvicorn: 5 s), so that no request meets a
connection that closes."""
_CONNECT_S = 10.0
_DONE = b"[DONE]"
_SHOWN_BYTES = 500
MAX_EVENT_BYTES = 4 << 20


@asynccontextmanager
async def http_target(endpoint: Endpoint) -> AsyncIterator[HttpTarget]:
    """The server at `endpoint`, with one connection for each open request."""
    secure = _tls(endpoint.reach) if endpoint.url.startswith("https:") else None
    key = endpoint.reach.get("api_key")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=secure or True)
    # The runner bounds the whole request.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield HttpTarget(session, endpoint)


class HttpTarget:
    """The server at `endpoint`."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._session = session
        self._url = endpoint.url
        self._fields = {"model": endpoint.model} if endpoint.model else {}
        self._body = endpoint.body
        self._server_name = endpoint.reach.get("server_name")
        self._tokenizer = _tokenizer(endpoint.tokenizer) if endpoint.tokenizer else None

    async def send(self, job: Job, outcome: Outcome) -> None:
        reader = _Reader(job, outcome)
        try:
            async with self._session.post(
                self._url, data=self._request(job), headers=_JSON, server_hostname=self._server_name
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async for piece in response.content.iter_any():
                    reader.take(piece)
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed("connection", str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            if not reader.done:
                raise RequestFailed("connection lost", f"{type(error).__name__}: {error}") from None
        reader.end()

    async def vocab_size(self) -> int | None:
        return self._tokenizer.get_vocab_size() if self._tokenizer else None

    def _request(self, job: Job) -> bytes:
        prompt = job.prompt
        if self._tokenizer and not isinstance(prompt, str):
            prompt = self._tokenizer.decode(prompt)
        salt = {"cache_salt": job.cache_salt} if job.cache_salt else {}
        asked = {"prompt": prompt, "max_tokens": job.output_tokens, **salt}
        body = {**asked, **self._fields, **_FIELDS, **self._body}
        return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


_JSON = {"Content-Type": "application/json"}
_FIELDS = {
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
}


class EventTooLong(ValueError):
    """The server sent a line that is too long."""


class Events:
    """Takes a stream of server-sent events in pieces, gives the data of the events that are complete.

    Only the part of the format that completions use (WHATWG HTML, 9.2.6): data fields, comments, blank lines.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that `piece` completes, in their order; raises EventTooLong."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class _Reader:
    """Reads one response's events into an outcome."""

    def __init__(self, job: Job, outcome: Outcome) -> None:
        self._asked = job.output_tokens
        self._outcome = outcome
        self._events = Events()
        self._finish = ""
        self._usage: int | None = None
        self.done = False
        self._exact = True

    def take(self, piece: bytes) -> None:
        """Record the events that this piece of the stream completes."""
        try:
            for data in self._events.feed(piece):
                if data == _DONE:
                    self.done = True
                else:
                    self._event(data)
        except EventTooLong as error:
            raise RequestFailed("bad event", str(error)) from None

    def end(self) -> None:
        """Record the end of the stream. Raises RequestFailed if the output is not complete."""
        outcome = self._outcome
        if not (self.done or self._finish):
            raise RequestFailed("cut short", f"the stream ended after {outcome.tokens} tokens without its final event")
        if not self._exact:
            if self._usage is not None:
                outcome.tokens = self._usage
            elif self._finish == "length":
                outcome.tokens = self._asked
        if not outcome.times or outcome.tokens < self._asked:
            told = f"{outcome.tokens} tokens instead of {self._asked}, finish_reason {self._finish or None!r}"
            raise RequestFailed("short output", told)

    def _event(self, data: bytes) -> None:
        try:
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed("error event", preview(event["error"]))
            if usage := event.get("usage"):
                self._usage = int(usage["completion_tokens"])
                if (prompt_tokens := usage.get("prompt_tokens")) is not None:
                    self._outcome.input_tokens = int(prompt_tokens)
                if (cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens")) is not None:
                    self._outcome.cached_tokens = int(cached)
            for choice in event.get("choices", ()):
                self._choice(choice)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RequestFailed("bad event", f"{type(error).__name__}: {error}: {preview(data)}") from None

    def _choice(self, choice: Mapping[str, Any]) -> None:
        self._finish = choice.get("finish_reason") or self._finish
        if (ids := choice.get("token_ids")) is not None:
            if ids:
                self._outcome.event(len(ids))
        else:
            self._exact = False
            # A token whose bytes are no whole character has an empty text; so has a last event without a token.
            if choice.get("text") or not choice.get("finish_reason") or not self._outcome.times:
                self._outcome.event()


async def _refusal(response: aiohttp.ClientResponse) -> RequestFailed:
    text = (await response.content.read(_SHOWN_BYTES)).decode(errors="replace")
    ending = Ending.REFUSED if response.status == 429 else Ending.FAILED
    return RequestFailed(f"http {response.status}", text, ending, _retry_after(response.headers.get("Retry-After", "")))


def _retry_after(text: str) -> float | None:
    """Seconds from a Retry-After header; None if it has a date, which overloaded servers do not send."""
    return float(text) if text.isascii() and text.isdigit() else None


def _tls(reach: Mapping[str, Any]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=reach.get("ca"))
        if reach.get("cert"):
            context.load_cert_chain(reach["cert"], reach.get("key"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca: {error}") from None
    return context


def _tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    from_file: Callable[[str], Any] = Tokenizer.from_file
    try:
        return from_file(str(file))
    except Exception as error:
        # The library raises bare exceptions.
        raise ConfigError(f"tokenizer: {str(file)!r} can't be used: {error}") from None
