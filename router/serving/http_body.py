"""Receives and reads bodies of HTTP requests.

    receive ── at most `limit` bytes ── small: one call of the parser on the event loop
                                     └─ large: on a thread, in pieces

The parser holds the interpreter's lock for its whole call: 16 ms for a text of 5 MB with escapes, 40 ms for a million
token ids. So long texts and long lists of token ids are found and taken out of a large body first, and read in pieces.
The parser reads the rest, of which the number of values is limited.

    {"prompt":[1,2,...,3],"n":1}  ──▶  {"prompt":["<mark>0"],"n":1}  +  [1,2,...,3]
"""

from __future__ import annotations

import asyncio
import re
import secrets
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from baton.errors import BatonError, DeadlineExceeded, InvalidRequest

RECEIVE_S = 300.0
"""Longest time in seconds in which a whole body must come."""

SMALL_BYTES = 64 << 10
"""Size up to which a body is parsed on the event loop, in half a millisecond at most."""

MAX_VALUES = 1 << 15
"""Most values of a large body, without the token ids of long lists."""

_LONG = 8 << 10
"""Bytes from which on a text, or a list of token ids, is taken out."""

_PIECE = 32 << 10
"""Bytes that are read in one call."""

_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_UNITS = re.compile(rb'[^"\\]*+(?:\\(?:u[0-9a-fA-F]{4}|[^u])[^"\\]*+)*+', re.DOTALL)
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ESCAPE = re.compile(rb"\\u[0-9a-fA-F]{4}")
_OPENING = re.compile(rb'["\[]')
_IDS = re.compile(rb"[0-9,\s]*+")
_QUOTE, _BACKSLASH, _CLOSING = b'"\\]'


class BodyTooLarge(BatonError):
    """A body has more bytes than a request may have."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 413


async def receive(receive: Receive, declared: str | None, limit: int) -> bytes:
    """The body of a request, of which `declared` is the content-length, if there is one.

    Raises BodyTooLarge beyond `limit` bytes, DeadlineExceeded if it does not come in time, and ClientDisconnect.
    """
    if declared is not None and declared.isdecimal() and int(declared[:20]) > limit:
        raise BodyTooLarge(f"body: has {declared[:20]} bytes, at most {limit} are allowed")
    pieces, size, more = list[bytes](), 0, True
    try:
        async with asyncio.timeout(RECEIVE_S):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientDisconnect
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > limit:
                    raise BodyTooLarge(f"body: has more than the {limit} bytes that are allowed")
                more = message.get("more_body", False)
    except TimeoutError:
        raise DeadlineExceeded(f"body: {size} bytes came within {RECEIVE_S:g} s, and not all") from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in a body; lists of many token ids are arrays of uint32.

    Call it on a thread if the body has more than SMALL_BYTES. Raises InvalidRequest.
    """
    try:
        found = from_json(data, allow_inf_nan=False) if len(data) <= SMALL_BYTES else _LargeBody(data).read()
    except ValueError as error:
        raise InvalidRequest("body", f"is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return found


@dataclass(slots=True)
class _LargeBody:
    """A large body, and the places of what is taken out of it."""

    data: bytes
    _mark: str = field(default_factory=lambda: secrets.token_hex(8))
    _kept: list[bytes] = field(default_factory=list)
    _taken: list[tuple[int, int, str]] = field(default_factory=list)
    """Begin and end of each part that was taken out; of a list of token ids also the name before it."""
    _copied: int = 0
    _values: int = 0

    def read(self) -> Any:
        """The value in the body. Raises ValueError or InvalidRequest."""
        self._take_out()
        self._kept.append(self.data[self._copied :])
        tree = from_json(b"".join(self._kept), allow_inf_nan=False)
        return self._filled(tree) if self._taken else tree

    def _take_out(self) -> None:
        data, at, name = self.data, 0, ""
        while at < len(data):
            found = _OPENING.search(data, at, at + _PIECE)
            begin = found.start() if found else min(at + _PIECE, len(data))
            self._count(data.count(b",", at, begin))
            at = begin + 1 if found else begin
            if not found:
                continue
            if data[begin] == _QUOTE:
                at = self._string_end(at)
                if at - begin > _LONG:
                    self._take(begin + 1, at)
                elif data[at + 1 : at + 2] == b":":
                    name = data[begin + 1 : at].decode("utf-8", "replace")
                self._count(1)
                at += 1
            else:
                at = self._ids_end(at)
                if data[at : at + 1] == b"]" and at - begin > _LONG:
                    self._take(begin + 1, at, name or "body")
                else:
                    self._count(data.count(b",", begin, at))

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise InvalidRequest("body", f"has more than {MAX_VALUES} values")

    def _take(self, begin: int, end: int, name: str = "") -> None:
        text = f"{self._mark}{len(self._taken)}"
        self._kept += self.data[self._copied : begin], (f'"{text}"' if name else text).encode()
        self._taken.append((begin, end, name))
        self._copied = end

    def _string_end(self, at: int) -> int:
        """Position of the quotation mark that ends the string in which `at` is."""
        data = self.data
        while at < len(data):
            found = _STRING.match(data, at, at + _PIECE)
            at = found.end() if found else at
            if at < len(data) and data[at] == _QUOTE:
                return at
            if at < len(data) and data[at] == _BACKSLASH:
                at += 2
        raise ValueError("a string does not end")

    def _ids_end(self, at: int) -> int:
        """Position of the first byte from `at` on that is neither a digit, nor a comma, nor a space."""
        while (found := _IDS.match(self.data, at, at + _PIECE)) is not None and found.end() > at:
            at = found.end()
        return at

    def _filled(self, value: Any) -> Any:
        """The value with what was taken out."""
        if isinstance(value, str):
            return self._text(*self._taken[self._number(value)][:2]) if value.startswith(self._mark) else value
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], str) and value[0].startswith(self._mark):
                begin, end, name = self._taken[self._number(value[0])]
                if name:
                    return self._ids(begin, end, name)
            return [self._filled(each) for each in value]
        if isinstance(value, dict):
            if any(name.startswith(self._mark) for name in value):
                raise InvalidRequest("body", f"a name has more than {_LONG} bytes")
            return {name: self._filled(each) for name, each in value.items()}
        return value

    def _number(self, text: str) -> int:
        return int(text[len(self._mark) :])

    def _text(self, begin: int, end: int) -> str:
        return "".join(self._pieces_of_text(begin, end))

    def _pieces_of_text(self, at: int, end: int) -> Iterator[str]:
        data = self.data
        while at < end:
            found = _UNITS.match(data, at, min(at + _PIECE, end))
            cut = found.end() if found and found.end() > at else end
            if _HIGH_SURROGATE.fullmatch(data, max(cut - 6, at), cut) and (low := _ESCAPE.match(data, cut, end)):
                cut = low.end()
            while cut < end and data[cut] & 0xC0 == 0x80:
                cut += 1
            yield from_json(b'"%b"' % data[at:cut])
            at = cut

    def _ids(self, at: int, end: int, name: str) -> array[int]:
        data, ids = self.data, array("I")
        while at < end:
            cut = end if end - at <= _PIECE else data.rfind(b",", at, at + _PIECE)
            if cut < 0:
                raise ValueError("a number is too long")
            if at and data[at - 1 : at] == b"," and not data[at:cut].strip():
                raise ValueError("a value is missing in a list")
            try:
                ids.extend(from_json(b"[%b]" % data[at:cut]))
            except (OverflowError, TypeError):
                raise InvalidRequest(name, f"token ids must be in [0, {1 << 32})") from None
            at = cut + 1
        return ids
