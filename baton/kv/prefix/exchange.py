"""What is said on one connection: look-ups, fetches and writes of some keys of one node. Blocks; runs in threads.

An exchange has a slot for each key of a request, and fills the slots of the indexes that it is run for. So exchanges
with several nodes, or on several connections, fill one list at once. Replies that concern the whole server are raised
once all replies were read; others stay in their slots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from baton.kv.prefix.buffers import Buffers
from baton.kv.prefix.contract import Payload
from baton.kv.prefix.faults import concerns_server, count, reason
from baton.kv.prefix.record import HEADER_BYTES, BadRecord, RecordCodec
from baton.kv.prefix.wire import Wire, pack

WINDOW_BYTES = 1 << 20
"""Of a fetch, twice as much is asked for ahead of what was read; with more, data leaves the caches on its way."""

_ASKING = pack(b"ASKING")


class Exchange(Protocol):
    """`slots[i]` becomes the reply for key i; None if there is none."""

    slots: list[Any]

    def run(self, wire: Wire, indexes: Sequence[int], asking: bool) -> None:
        """Fill some slots; `asking`: each command is for a slot that is on its way to this node."""


class Commands:
    """A packed command for each key, in one pipeline."""

    def __init__(self, commands: Sequence[bytes]) -> None:
        self._commands = commands
        self.slots: list[Any] = [None] * len(commands)

    def run(self, wire: Wire, indexes: Sequence[int], asking: bool) -> None:
        """Send all, then read all."""
        ahead = _ASKING if asking else b""
        wire.send(b"".join([ahead + self._commands[index] for index in indexes]))
        _read_all(wire, self.slots, indexes, asking)


class Fetch:
    """Payloads of blocks, each checked while the next ones are being received.

    A bad or missing record ends the run: what comes after it is not asked for any more. Of a slot on the move the
    error is kept, and may be filled by another run. `refused` gets the index and the header of each bad record, as far
    as it has one; `gone` gets the index of each missing one.
    """

    def __init__(self, keys: Sequence[bytes], digests: Sequence[bytes], codec: RecordCodec, buffers: Buffers) -> None:
        self._keys, self._digests, self._codec = keys, digests, codec
        self._take_buffer = buffers.take
        self._window = max(1, WINDOW_BYTES // codec.record_bytes)
        self._end = len(keys)
        self.slots: list[Any] = [None] * len(keys)
        self.refused: list[tuple[int, bytes]] = []
        self.gone: list[int] = []
        self.first_at = float("inf")

    def stop(self) -> None:
        """Nobody waits for the rest."""
        self._end = 0

    def payloads(self) -> list[Payload]:
        """Those that came, up to the first that did not."""
        found: list[Payload] = []
        for slot in self.slots:
            if slot is None or isinstance(slot, Exception):
                break
            found.append(slot)
        return found

    def lanes(self, indexes: Sequence[int], lanes: int) -> list[list[int]]:
        """The indexes for `lanes` connections that take turns; fewer where not all would have two turns."""
        turns = list(_runs(indexes, self._window))
        lanes = max(1, min(lanes, len(turns) // 2))
        return [[index for turn in turns[lane::lanes] for index in turn] for lane in range(lanes)]

    def run(self, wire: Wire, indexes: Sequence[int], asking: bool) -> None:
        """Keep two windows asked for; check each record as it comes."""
        windows, asked, refused = _runs(indexes, self._window), deque[Sequence[int]](), None
        while True:
            while len(asked) < 2 and (window := next(windows, ())) and window[0] < self._end:
                self._ask(wire, window, asking)
                asked.append(window)
            if not asked:
                break
            for index in asked.popleft():
                if asking:
                    wire.read()
                reply = wire.read_value(self._take_buffer, self._codec.record_bytes)
                self.first_at = min(self.first_at, time.monotonic())
                if concerns_server(reply):
                    refused, self._end = reply, 0
                self._take(index, reply)
        if refused is not None:
            raise refused

    def _ask(self, wire: Wire, window: Sequence[int], asking: bool) -> None:
        ahead = _ASKING if asking else b""
        wire.send(b"".join([ahead + pack(b"GET", self._keys[index]) for index in window]))

    def _take(self, index: int, reply: Any) -> None:
        if index >= self._end:
            return
        if isinstance(reply, bytes | memoryview):
            try:
                self.slots[index] = self._codec.decode(self._digests[index], reply)
                return
            except BadRecord as error:
                count(error.reason)
                self.refused.append((index, bytes(reply[:HEADER_BYTES])))
        elif isinstance(reply, Exception):
            self.slots[index] = reply
            if reason(reply) == "moved":
                return
        elif reply is None:
            count("evicted")
            self.gone.append(index)
        self._end = min(self._end, index)


class Store:
    """Writes of blocks that expire after `ttl_s`; each is signed while the server takes in the one before."""

    def __init__(self, keys: Sequence[bytes], blocks: Sequence[tuple[bytes, Payload]], codec: RecordCodec, ttl_s: int):
        self._keys, self._blocks, self._codec = keys, blocks, codec
        self._tail = b"\r\n" + pack(b"EX", b"%d" % ttl_s).partition(b"\r\n")[2]
        self.slots: list[Any] = [None] * len(keys)

    def run(self, wire: Wire, indexes: Sequence[int], asking: bool) -> None:
        """Send all, then read all; the replies are short."""
        ahead = _ASKING if asking else b""
        for index in indexes:
            key, (digest, payload) = self._keys[index], self._blocks[index]
            header = self._codec.header(digest, payload)
            size = len(header) + len(payload)
            head = b"%b*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (ahead, len(key), key, size, header)
            wire.send(head, payload, self._tail)
        _read_all(wire, self.slots, indexes, asking)


class Clear:
    """Deletes the keys of one node that match, a batch in each run; `deleted` is their number so far.

    A server has looked at all its keys after many runs: then it is `done`. A run that fails leaves `batches` as it was.
    `refused` is the first error that a deletion was answered with.
    """

    _MANY = b"250"

    def __init__(self, pattern: bytes) -> None:
        self._pattern, self._cursor = pattern, b"0"
        self.deleted = self.batches = 0
        self.done = False
        self.refused: Exception | None = None
        self.slots: list[Any] = []

    def run(self, wire: Wire, indexes: Sequence[int], asking: bool) -> None:
        """Look at some keys more, and delete those that match."""
        wire.send(pack(b"SCAN", self._cursor, b"MATCH", self._pattern, b"COUNT", self._MANY))
        reply = wire.read()
        if isinstance(reply, Exception):
            raise reply
        cursor, keys = reply
        wire.send(b"".join([pack(b"UNLINK", key) for key in keys]))
        replies = [wire.read() for _ in keys]
        self.deleted += sum(deleted for deleted in replies if isinstance(deleted, int))
        for error in (reply for reply in replies if isinstance(reply, Exception)):
            count(reason(error))
            self.refused = self.refused or error
        self._cursor, self.done = cursor, cursor == b"0"
        self.batches += 1


def _read_all(wire: Wire, slots: list[Any], indexes: Sequence[int], asking: bool) -> None:
    refused = None
    for index in indexes:
        if asking:
            wire.read()
        reply = wire.read()
        if concerns_server(reply):
            refused = reply
        else:
            slots[index] = reply
    if refused is not None:
        raise refused


def _runs(indexes: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    return (indexes[start : start + most] for start in range(0, len(indexes), most))
