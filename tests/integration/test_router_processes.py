"""`python -m router` as one process and as several: starts, spread, a death, a drain, bad settings."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import bundled
from baton.config.router import RouterConfig
from baton.errors import BatonError, ConfigError
from baton.pb import inference_pb2, inference_pb2_grpc
from baton.process.supervisor import bind_to_parent
from router.app import run
from router.processes import run_router_processes
from tests.integration.router_stubs import checkpoint
from tests.processes import gone

STEP_MS = 10
NOBODY = ["--prefill=127.0.0.1:1", "--decode=127.0.0.1:1"]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@dataclass
class Routers:
    """The parent, the port, and where each router tells its metrics."""

    parent: subprocess.Popen[str]
    address: str
    http: str
    ops: list[str]

    def children(self) -> list[int]:
        pid = self.parent.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def successor(self, other: int) -> int:
        """The process that is started beside `other`, as soon as it is there."""
        limit = time.monotonic() + 60
        while not (found := [child for child in self.children() if child != other]):
            assert time.monotonic() < limit, "no process was started"
            time.sleep(0.001)
        return found[0]

    def served(self, number: int) -> float:
        """Requests that one router has served."""
        with urllib.request.urlopen(f"http://{self.ops[number]}/metrics", timeout=60) as answer:
            found = re.search(r'^baton_requests_total{.*status="OK".*} (\S+)$', answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


def process(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = bind_to_parent([sys.executable, "-m", *arguments])
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def listening(started: subprocess.Popen[str]) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", started.stdout.readline()))


@contextlib.contextmanager
def routers(*flags: str) -> Iterator[Routers]:
    with process("tests.router_workers", f"--step-ms={STEP_MS}") as workers:
        where = listening(workers)
        places = [f"--prefill={where['prefill']}", f"--decode={where['decode']}", f"--model={bundled.path()}"]
        with process("router", *places, "--processes=2", "--log-level=warning", "--http=127.0.0.1:0", *flags) as parent:
            try:
                found = listening(parent)
                ops = found["ops"].split(",")
                for each in ops:
                    ready(each)
                yield Routers(parent, found["grpc"], found["http"], ops)
            finally:
                parent.kill()
                workers.kill()


@contextlib.contextmanager
def stream(address: str, tokens: int) -> Iterator[Iterator[inference_pb2.GenerateResponse]]:
    """One request on a connection of its own."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[300] * 4),
            sampling=inference_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
        )
        yield inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60, wait_for_ready=True)


def ask(address: str, tokens: int = 3) -> int:
    """Tokens of one answer."""
    with stream(address, tokens) as events:
        return sum(len(delta.tokens) for event in events for delta in event.choices)


def ask_over_http(address: str) -> int:
    """Tokens of one answer."""
    body = json.dumps({"prompt": [300] * 4, "max_tokens": 3, "ignore_eos": True}).encode()
    with urllib.request.urlopen(f"http://{address}/v1/completions", body, timeout=60) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def closes(address: str) -> None:
    """Return as soon as nobody listens there any more."""
    host, port = address.rsplit(":", 1)
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.05)
    pytest.fail(f"{address} is still open")


def listens(address: str) -> None:
    """Return as soon as somebody listens there."""
    host, port = address.rsplit(":", 1)
    limit = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < limit, f"nobody listens at {address}"
            time.sleep(0.05)


def ready(ops: str) -> None:
    """Return as soon as the router there has its workers, without which it refuses."""
    limit = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://{ops}/ready", timeout=60).close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > limit:
                raise
            time.sleep(0.05)


def test_requests_are_spread_and_a_death_leaves_the_other_serving() -> None:
    with routers() as found:
        assert [ask(found.address) for _ in range(16)] == [3] * 16
        served = [found.served(number) for number in range(2)]
        assert sum(served) == 16
        assert all(served)
        assert [ask_over_http(found.http) for _ in range(16)] == [3] * 16
        assert all(found.served(number) > served[number] for number in range(2))
        served = [found.served(number) for number in range(2)]
        dead, lives = found.children()
        os.kill(dead, signal.SIGKILL)
        line = found.parent.stderr.readline()
        assert "router 0 was killed by SIGKILL; its last line: " in line
        assert line.endswith("; it is started again at once\n")
        successor = found.successor(lives)
        # Otherwise it might listen before all requests have come.
        os.kill(successor, signal.SIGSTOP)
        assert [ask(found.address) for _ in range(8)] == [3] * 8
        assert found.served(1) == served[1] + 8
        os.kill(successor, signal.SIGCONT)
        # The one in its place tells its metrics where it did.
        listens(found.ops[0])
        assert found.served(0) == 0
        assert found.children()[0] == lives


def test_sigterm_drains_all_and_leaves_nothing_behind() -> None:
    with routers() as found, contextlib.ExitStack() as stack:
        calls = [stack.enter_context(stream(found.address, 50)) for _ in range(8)]
        firsts = [next(call) for call in calls]
        children = found.children()
        found.parent.send_signal(signal.SIGTERM)
        for first, call in zip(firsts, calls, strict=True):
            events = [first, *call]
            assert sum(len(delta.tokens) for event in events for delta in event.choices) == 50
        assert found.parent.wait(60) == 0
        assert gone(children)


def test_a_second_sigterm_cuts_the_drain_short() -> None:
    with routers() as found, stream(found.address, 1500) as call:
        next(call)
        children = found.children()
        found.parent.send_signal(signal.SIGTERM)
        assert "draining 1 request, up to 30 s; " in found.parent.stderr.readline()
        closes(found.address)
        found.parent.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as cut:
            list(call)
        assert cut.value.code() is UNAVAILABLE
        assert found.parent.wait(60) == 0
        assert gone(children)


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("grpc", "TAKEN", "grpc: TAKEN is already in use"),
        ("ops", "127.0.0.1:65535", "ops: 127.0.0.1:65535 leaves no port for router 1"),
    ],
)
async def test_bad_settings_are_named(setting: str, value: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        own: dict[str, Any] = {setting: value.replace("TAKEN", address)}
        config = RouterConfig(prefill=("127.0.0.1:1",), decode=("127.0.0.1:1",), processes=2, **own)
        with pytest.raises(ConfigError, match=words.replace("TAKEN", address)):
            async with run_router_processes(config):
                pytest.fail("they have started")


def test_a_router_that_does_not_start_ends_all_with_two() -> None:
    with process("router", *NOBODY, "--processes=2", "--model=/no/such/place") as refused:
        _, log = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "/no/such/place" in log


def test_starts_and_stops(tmp_path: Path) -> None:
    with process("router", f"--model={checkpoint(tmp_path)}", *NOBODY) as router:
        line = router.stdout.readline()
        assert re.fullmatch(r"listening grpc=127\.0\.0\.1:\d+ ops=127\.0\.0\.1:\d+\n", line)
        router.send_signal(signal.SIGINT)
        _, log = router.communicate(timeout=60)
    assert router.returncode == 0, log


def test_a_full_disk_under_its_output_does_not_end_a_service(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "router", f"--model={checkpoint(tmp_path)}", *NOBODY, "--log-level=info"]
    with Path("/dev/full").open("w") as full, subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE) as router:
        assert router.stderr is not None
        assert any(b"listening grpc=" in line for line in router.stderr)
        router.send_signal(signal.SIGTERM)
        _, log = router.communicate(timeout=60)
    assert router.returncode == 0, log
    assert b"draining after SIGTERM" in log


@pytest.mark.parametrize(("setting", "value"), [("grpc", "0.0.0.0:0"), ("model", "/no/such/place")])
async def test_bad_settings_of_one_router_are_named(tmp_path: Path, setting: str, value: str) -> None:
    """Settings that flags alone do not show to be bad; for the others see the unit tests of the settings."""
    workers: dict[str, Any] = {"prefill": ("127.0.0.1:1",), "decode": ("127.0.0.1:1",)}
    config = RouterConfig(**{"model": str(checkpoint(tmp_path)), **workers, setting: value})
    with pytest.raises(BatonError, match=value):
        async with run(config):
            pytest.fail("it has started")
