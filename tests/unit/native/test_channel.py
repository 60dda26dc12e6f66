"""A channel between two threads, each with a mapping of its own, and between two processes."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from baton.errors import EngineError
from baton.native.collective import Channel, channel_memory
from tests.kernels import needs_native

pytestmark = needs_native

CAPACITY = 64
SIZES = (1, 16, 17, 16, 40, 3, 100)
"""Floats of messages: shorter than a buffer, as long, and of several pieces."""


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    fd = channel_memory(CAPACITY)
    pair = Channel(fd, CAPACITY), Channel(fd, CAPACITY)
    os.close(fd)
    yield pair
    for each in pair:
        each.close()


def messages() -> list[Tensor]:
    return [torch.full((2, size), float(number)) for number, size in enumerate(SIZES * 20)]


def send_all(place: str) -> None:
    fd = os.open(place, os.O_RDWR)
    channel = Channel(fd, CAPACITY)
    for message in messages():
        channel.send(message)


def test_messages_arrive_in_order_from_another_process() -> None:
    fd = channel_memory(CAPACITY)
    channel = Channel(fd, CAPACITY)
    process = multiprocessing.get_context("forkserver").Process(
        target=send_all, args=(f"/proc/{os.getpid()}/fd/{fd}",), daemon=True
    )
    process.start()
    for message in messages():
        assert torch.equal(channel.receive(message.shape, message.dtype), message)
    process.join()
    os.close(fd)
    channel.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_are_joined_whoever_is_late(ends: tuple[Channel, Channel], dtype: torch.dtype) -> None:
    sender, receiver = ends
    sent = [torch.randn(size, 3).to(dtype).t() for size in SIZES]
    for late in (sender, receiver):

        def send(late: Channel = late) -> None:
            for message in sent:
                time.sleep(0.002 * (late is sender))
                sender.send(message)

        with ThreadPoolExecutor(1) as beside:
            sending = beside.submit(send)
            for message in sent:
                time.sleep(0.002 * (late is receiver))
                assert torch.equal(receiver.receive(message.shape, dtype), message)
            sending.result()
    assert sender.waited_s > 0
    assert receiver.waited_s > 0


def test_a_sender_is_one_message_ahead_of_the_next_to_be_received(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    with ThreadPoolExecutor(1) as beside:
        for number in range(2):
            sender.send(torch.tensor([number]))
        third = beside.submit(sender.send, torch.tensor([2]))
        time.sleep(0.05)
        assert not third.done()
        assert receiver.receive([1], torch.int64).item() == 0
        third.result(10)
        assert [receiver.receive([1], torch.int64).item() for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("waiting", ["sender", "receiver"])
@pytest.mark.parametrize("asleep", [True, False])
def test_an_abort_ends_a_wait_until_a_reset(ends: tuple[Channel, Channel], waiting: str, asleep: bool) -> None:
    sender, receiver = ends
    calls: dict[str, Callable[[], object]] = {
        "sender": lambda: sender.send(torch.zeros(100)),
        "receiver": lambda: receiver.receive([100], torch.float32),
    }
    other = receiver if waiting == "sender" else sender
    ended: list[float] = []

    def wait() -> None:
        with pytest.raises(EngineError, match="the channel was aborted"):
            calls[waiting]()
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05 * asleep)
    began = time.monotonic()
    other.abort()
    thread.join()
    assert ended[0] - began < 1
    assert sender.aborted
    for call in calls.values():
        with pytest.raises(EngineError, match="aborted"):
            call()
    # The pieces that were sent before are forgotten.
    other.reset()
    assert not sender.aborted
    sender.send(torch.ones(16))
    assert receiver.receive([16], torch.float32).tolist() == [1.0] * 16


def test_memory_that_does_not_fit_is_refused() -> None:
    fd = channel_memory(CAPACITY)
    with pytest.raises(EngineError, match="0 bytes at once"):
        Channel(fd, 0)
    with pytest.raises(EngineError, match="the channel's memory has"):
        Channel(fd, 1 << 20)
    channel = Channel(fd, CAPACITY)
    os.close(fd)
    with pytest.raises(EngineError, match="the channel's memory: "):
        Channel(fd, CAPACITY)
    channel.close()
    with pytest.raises(EngineError, match="the channel is closed"):
        channel.send(torch.ones(1))
