"""Long texts through a router: the same ids, and a clear end for whoever asks while a text is tokenized."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import request as request_types
from baton.pb import inference_pb2, inference_pb2_grpc
from baton.rpc.channel import control_channel
from router.serving import threads, tokenizer_processes, validator
from router.serving.tokenizer_processes import TokenizerProcesses
from tests.integration.router_rig import RouterRig, refused, request, router_rig, whole

WAIT_S = 60
TEXT = "a text that is länger, 日本"


class Processes:
    """The processes that a router has started; `stop` and `wait` hold one while it has a text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[subprocess.Popen[bytes]] = []
        self._waiting = threading.Event()
        take, receive = TokenizerProcesses._take, tokenizer_processes._receive

        def taking(processes: TokenizerProcesses) -> subprocess.Popen[bytes] | None:
            if (process := take(processes)) is not None:
                self.taken.append(process)
            return process

        def receiving(*arguments: Any) -> bytearray:
            self._waiting.set()
            return receive(*arguments)

        monkeypatch.setattr(TokenizerProcesses, "_take", taking)
        monkeypatch.setattr(tokenizer_processes, "_receive", receiving)
        monkeypatch.setattr(validator, "LONG_TEXT", len(TEXT.encode()))
        monkeypatch.setattr(validator, "_INLINE_BYTES", 4)
        monkeypatch.setattr(validator, "_PIECE", 4)
        monkeypatch.setattr(request_types, "_PIECE", 4)

    def stop(self) -> None:
        os.kill(self.taken[-1].pid, signal.SIGSTOP)
        self._waiting.clear()

    async def wait(self) -> None:
        assert await asyncio.to_thread(self._waiting.wait, WAIT_S)


def ask(b: RouterRig) -> grpc.aio.UnaryStreamCall:
    return b.client.Generate(request(TEXT, max_tokens=1), timeout=WAIT_S)


async def ask_stopped(b: RouterRig, processes: Processes) -> grpc.aio.UnaryStreamCall:
    """A call whose text is with a process that is stopped."""
    await whole(ask(b))
    processes.stop()
    call = ask(b)
    await processes.wait()
    return call


async def test_a_process_tokenizes_long_texts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch)
    async with asyncio.timeout(WAIT_S), router_rig(tmp_path, template="{{ messages[0].content }}") as b:
        await b.answer(max_tokens=1)
        assert not processes.taken
        await whole(ask(b))
        ids = list((await b.client.Tokenize(inference_pb2.TokenizeRequest(text=TEXT))).token_ids)
        assert ids == list(b.prefill[0].requests[-1].prompt_token_ids)
        assert len(ids) == len(TEXT.encode()) + 1
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=TEXT)])
        assert list((await b.client.Tokenize(inference_pb2.TokenizeRequest(chat=chat))).token_ids) == ids[1:]
        assert (len(processes.taken), len(set(processes.taken))) == (3, 1)
    assert processes.taken[0].poll() is not None


async def test_a_killed_process_ends_its_request_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch)
    # Of which one tenant may use two.
    monkeypatch.setattr(threads, "_MIN_THREADS", 3)
    async with asyncio.timeout(WAIT_S), router_rig(tmp_path) as b:
        call = await ask_stopped(b, processes)
        killed = processes.taken[-1]
        other = await ask_stopped(b, processes)
        killed.kill()
        error = await refused(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "the process that tokenized the text ended with status -9; try again"
        assert processes.taken[-1] is not killed
        os.kill(processes.taken[-1].pid, signal.SIGCONT)
        await whole(other)


async def test_a_client_that_leaves_frees_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch)
    async with asyncio.timeout(WAIT_S), router_rig(tmp_path) as b:
        call = await ask_stopped(b, processes)
        call.cancel()
        await b.app._door._idle.wait()
        os.kill(processes.taken[-1].pid, signal.SIGCONT)
        await whole(ask(b))
        assert len(b.prefill[0].requests) == 2
        assert len(set(processes.taken)) == 1


async def test_a_router_that_stops_tells_and_kills_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch)
    async with asyncio.timeout(WAIT_S), contextlib.AsyncExitStack() as client:
        async with router_rig(tmp_path) as b:
            # The router_rig closes its own channel before the router.
            channel = await client.enter_async_context(control_channel(b.app.address))
            call = await ask_stopped(replace(b, client=inference_pb2_grpc.InferenceStub(channel)), processes)
        error = await refused(call)
        assert (error.code(), error.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the router is stopping, and the text is not tokenized",
        )
    assert processes.taken[-1].poll() == -signal.SIGKILL
