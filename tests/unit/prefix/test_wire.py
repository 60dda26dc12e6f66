"""The wire: replies cut anywhere, large ones into buffers that come back, and one deadline for all of a call."""

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from redis.exceptions import AuthenticationError, InvalidResponse, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from baton.kv.prefix.buffers import Buffers
from baton.kv.prefix.host import is_owned
from baton.kv.prefix.wire import LARGE, Wire, pack, wire_size

SIZES = (0, 1, LARGE - 1, LARGE, 65_533, 65_534, 65_535, 65_536, 200_000)


@pytest.fixture
def pair() -> Iterator[tuple[Wire, socket.socket]]:
    ours, theirs = socket.socketpair()
    wire = Wire(65536)
    wire.on_connect(SimpleNamespace(_sock=ours, socket_timeout=5.0))
    with ours, theirs:
        yield wire, theirs


def say(theirs: socket.socket, data: bytes, cut: int = 1 << 30) -> threading.Thread:
    def run() -> None:
        for start in range(0, len(data), cut):
            theirs.sendall(data[start : start + cut])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


@pytest.mark.parametrize("cut", [1, 3, 1 << 30])
def test_all_kinds_of_replies(pair: tuple[Wire, socket.socket], cut: int) -> None:
    wire, theirs = pair
    data = b"+OK\r\n:-12\r\n$-1\r\n*-1\r\n$5\r\na\r\nbc\r\n*2\r\n$1\r\n0\r\n*1\r\n:7\r\n-ERR no\r\n-WRONGPASS no\r\n"
    sayer = say(theirs, data, cut)
    assert [wire.read() for _ in range(6)] == [b"OK", -12, None, None, b"a\r\nbc", [b"0", [7]]]
    assert isinstance(wire.read(), ResponseError)
    assert isinstance(wire.read(), AuthenticationError)
    assert not wire.can_read()
    sayer.join()


@pytest.mark.parametrize("size", [100, 65_536, 200_000])
@pytest.mark.parametrize("cut", [1000, 1 << 30])
def test_a_value_that_is_too_large_is_empty_and_the_next_one_is_not(
    pair: tuple[Wire, socket.socket], size: int, cut: int
) -> None:
    wire, theirs = pair
    value = b"$%d\r\n%b\r\n" % (size, bytes(size))
    sayer = say(theirs, value * 3 + b"$99\r\n" + bytes(99) + b"\r\n", cut)
    assert [wire.read_value(buffer, most=99), wire.read(most=99), wire.read_value(buffer, most=99)] == [b""] * 3
    assert wire.read(most=99) == bytes(99)
    sayer.join()


@pytest.mark.parametrize("reader", ["read", "read_value"])
@pytest.mark.parametrize("cut", [1000, 65_536, 1 << 30])
def test_values_of_all_sizes(pair: tuple[Wire, socket.socket], reader: str, cut: int) -> None:
    wire, theirs = pair
    values = [os.urandom(size) for size in SIZES]
    sayer = say(theirs, b"".join(b"$%d\r\n%b\r\n$-1\r\n" % (len(value), value) for value in values), cut)
    for value in values:
        for expected in (value, None):
            got = wire.read() if reader == "read" else wire.read_value(buffer)
            assert (got if got is None else bytes(got)) == expected
    sayer.join()


def test_errors_of_the_connection_are_raised_to_redis_py(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    theirs.sendall(b"-NOAUTH no\r\n-ERR no\r\n?what\r\n")
    with pytest.raises(AuthenticationError):
        wire.read_response()
    assert isinstance(wire.read_response(), ResponseError)
    with pytest.raises(InvalidResponse):
        wire.read()


def test_what_is_sent_arrives(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    pieces = [b"head", memoryview(os.urandom(3 << 20)), b"", b"tail"]
    got = bytearray()

    def receive() -> None:
        while len(got) < sum(map(len, pieces)):
            got.extend(theirs.recv(100_000))

    receiver = threading.Thread(target=receive)
    receiver.start()
    wire.send(*pieces)
    receiver.join()
    assert got == b"".join(pieces)
    assert pack(b"GET", b"a b") == b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n"


def test_a_deadline_bounds_reading_and_writing(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    theirs.sendall(b"$200000\r\nbegun")
    for call in (wire.read, lambda: wire.read_value(buffer), lambda: wire.send(bytes(64 << 20))):
        started = time.monotonic()
        wire.deadline = started + 0.1
        with pytest.raises(RedisTimeoutError):
            call()
        assert 0.05 < time.monotonic() - started < 60
        with pytest.raises(RedisTimeoutError):
            wire.read()  # the time is up


def test_the_end_of_a_connection(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    theirs.sendall(b"$200000\r\nbegun")
    theirs.close()
    assert wire.can_read()
    with pytest.raises(RedisConnectionError):
        wire.read_value(buffer)
    with pytest.raises(RedisConnectionError):
        wire.send(bytes(1 << 20))


def test_buffers_are_lent_until_the_last_view_is_gone(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    size = 3 * LARGE
    buffers, values = Buffers(wire_size(size)), [os.urandom(size) for _ in range(3)]
    addresses = []
    for value in values:
        sayer = say(theirs, b"$%d\r\n%b\r\n" % (size, value))
        payload = wire.read_value(buffers.take)[100:]
        sayer.join()
        assert bytes(payload) == value[100:]
        assert payload.readonly
        assert is_owned(payload)
        addresses.append(id(payload.obj.memory))
        if value is values[0]:
            kept = payload
        del payload
        gc.collect()
    assert addresses[0] != addresses[1] == addresses[2]
    assert bytes(kept) == values[0][100:], "nobody wrote to it meanwhile"
    assert len(buffers.take(5)) == 5
