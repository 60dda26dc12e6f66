"""Large values to and from Redis: a parser for redis-py's connections that receives them where they stay.

redis-py connects, authenticates and encrypts; then a `Wire` sends packed commands and reads replies. hiredis copies a
value from its read buffer into its own and from there into the reply; sending, redis-py packs a value into a new
string. Measured at 192 KiB to 3 MiB over a unix socket, a wire takes a half of the processor's time per byte to
read, and a quarter to a tenth to write. A large value costs two system calls, each of which gives up the
interpreter's lock once: with pieces of a socket buffer's size, a thread that computes beside it makes each piece wait
for up to 5 ms.

So a plain socket is in blocking mode, with the kernel's own timeouts; a TLS socket has Python's. Either way all that
is sent and read counts against one `deadline`. RESP2 only.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any

from redis._parsers import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as RedisTimeoutError

from baton.kv.prefix.contract import Payload

LARGE = 16 << 10
"""Bytes from which a value is received apart from the buffer."""

MOST = 1 << 20
"""Bytes of the largest value that is kept where no other limit is given: a writer may have put there what no memory
holds."""

_BUFFER = 64 << 10
_PEEK = 32
_LONGEST_S = 3600.0
_TOLERANCE_S = 0.01
_TIMEVAL = struct.Struct("@ll")
_CLOSED = "Connection closed by server."


class Wire(BaseParser):
    """Sends and reads on one connection; used by one thread at a time.

    `deadline` is a time of `time.monotonic`, or None for the connection's own timeout. Raises redis-py's
    ConnectionError and TimeoutError, after which the connection is of no more use.
    """

    def __init__(self, socket_read_size: int) -> None:
        self.deadline: float | None = None
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def on_connect(self, connection: Any) -> None:
        """Take the connection's new socket; the connection knows its wire from now on."""
        self._sock = connection._sock  # as redis-py's own parsers do
        self._timeout = connection.socket_timeout or _LONGEST_S
        self._tls = isinstance(self._sock, ssl.SSLSocket)
        self._start = self._end = 0
        self.deadline = None
        self._armed: dict[int, float] = {}
        connection.wire = self
        if not self._tls:
            self._sock.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._limit(option)

    def on_disconnect(self) -> None:
        """Nothing; redis-py closes the socket, and whoever is waiting for it gets an error."""

    def can_read(self, timeout: float = 0) -> bool:
        """Whether there is anything to read, be it the end."""
        if self._start < self._end:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Any:
        """One reply, as redis-py wants it: errors of the connection are raised, others returned."""
        reply = self.read()
        if isinstance(reply, RedisConnectionError):
            raise reply
        return reply

    def send(self, *pieces: Payload) -> None:
        """Send packed commands; they may be cut anywhere."""
        try:
            if self._tls:
                for piece in pieces:
                    self._limit(socket.SO_SNDTIMEO)
                    self._sock.sendall(piece)
                return
            views = [memoryview(piece) for piece in pieces]
            while views:
                self._limit(socket.SO_SNDTIMEO)
                sent = self._sock.sendmsg(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if views:
                    views[0] = views[0][sent:]
        except (BlockingIOError, TimeoutError):
            raise RedisTimeoutError("Timeout writing to socket") from None
        except OSError as error:
            raise RedisConnectionError(f"Error while writing to socket: {error}") from error

    def read(self, most: int = MOST) -> Any:
        """One reply: bytes, int, None, a list of these, or an exception, which is not raised.

        Of a value of more than `most` bytes nothing is kept: it is empty.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._value(int(rest), most) if rest != b"-1" else None
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return self.parse_error(rest.decode(errors="replace"))  # type: ignore[no-untyped-call]
        if kind == b"*":
            return [self.read(most) for _ in range(int(rest))] if rest != b"-1" else None
        raise InvalidResponse(f"Protocol Error: {line[:80]!r}")

    def read_value(self, take: Callable[[int], memoryview], most: int = MOST) -> Any:
        """Like `read`; a large value is received into a buffer that `take(wire_size(len(value)))` gives."""
        if self._tls or self._start < self._end:
            return self.read(most)
        head = bytes(self._view[: self._receive(self._view[:_PEEK], socket.MSG_PEEK)])
        end = head.find(b"\r\n") + 2
        size = int(head[1 : end - 2]) if head[:1] == b"$" and head[1 : max(end - 2, 0)].isdigit() else 0
        if not LARGE <= size <= most:
            return self.read(most)
        whole = take(end + size + 2)
        self._receive_into(whole)
        return whole[end : end + size].toreadonly()

    def _value(self, size: int, most: int) -> bytes:
        part = min(size + 2, self._end - self._start)
        if size > most:
            self._start += part
            while part < size + 2:
                part += self._receive(self._view[: size + 2 - part])
            return b""
        whole = memoryview(bytearray(size + 2))
        whole[:part] = self._view[self._start : self._start + part]
        self._start += part
        self._receive_into(whole[part:])
        return bytes(whole[:size])

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._fill()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _fill(self) -> None:
        left = self._end - self._start
        if left == len(self._buffer):
            raise InvalidResponse("Protocol Error: a line without end")
        self._view[:left] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, left
        self._end += self._receive(self._view[left:])

    def _receive_into(self, whole: memoryview) -> None:
        flags, got = 0 if self._tls else socket.MSG_WAITALL, 0
        while got < len(whole):
            got += self._receive(whole[got:], flags)

    def _receive(self, into: memoryview, flags: int = 0) -> int:
        self._limit(socket.SO_RCVTIMEO)
        try:
            got: int = self._sock.recv_into(into, flags=flags)
        except (BlockingIOError, TimeoutError):
            raise RedisTimeoutError("Timeout reading from socket") from None
        except OSError as error:
            raise RedisConnectionError(f"Error while reading from socket: {error}") from error
        if not got:
            raise RedisConnectionError(_CLOSED)
        return got

    def _limit(self, option: int) -> None:
        """Bound the next call by what is left until the deadline."""
        left = self._timeout if self.deadline is None else min(self.deadline - time.monotonic(), _LONGEST_S)
        if left <= 0:
            raise RedisTimeoutError("Timeout: the call's time is up")
        option = 0 if self._tls else option  # Python's timeout is one for both
        armed = self._armed.get(option)
        if armed is not None and left <= armed < left + _TOLERANCE_S:
            return
        self._armed[option] = left
        if self._tls:
            self._sock.settimeout(left)
        else:
            seconds, micros = divmod(max(1, int(left * 1e6)), 1_000_000)
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, micros))


def wire_size(size: int) -> int:
    """Bytes of a reply that is a value of `size` bytes."""
    return len(b"$%d\r\n\r\n" % size) + size


def pack(*words: bytes) -> bytes:
    """A command in RESP."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
