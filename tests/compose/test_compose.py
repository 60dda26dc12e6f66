"""The Compose deployment on real containers, plain and secure: answers, faults in mid-stream, restarts under load.

Each test leaves the fleet whole for the next one. The last test writes docs/compose-transcript.md. If one fails,
the logs of the containers are in build/compose-*.log.
"""

import asyncio
import contextlib
import json
import os
import platform
import ssl
import textwrap
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest

from baton import AsyncClient
from baton.errors import Unavailable
from tests.compose.deployment import NETWORK, PROJECT, ROOT, Deployment, has_image, secrets, until

pytestmark = pytest.mark.timeout(3600)

TRANSCRIPT = ROOT / "docs" / "compose-transcript.md"
LOGS = ROOT / "build"
PLAIN = ["deploy/compose.yaml"]
SECURE = [*PLAIN, "deploy/compose.secure.yaml"]
IMAGE = "localhost/baton:0.1.0"
SCALE = ("--scale", "prefill=2", "--scale", "decode=3")
LONG = 1500
"""Tokens of a stream that a fault hits: some seconds."""
SHORT = 100
"""Tokens of a stream that ends within the grace of a drain."""
STREAMS = 6
REACHABLE = """
import socket
for name in ("prefill", "decode"):
    for address in socket.gethostbyname_ex(name)[2]:
        socket.create_connection((address, 50051), 5).close()
        print(name, address)
"""
EXAMPLE = "def read(self, size=-1):\n    if self.closed:"
PROMPTS = [f"class Queue{number}:\n    def __init__(self):\n        " for number in range(STREAMS)]


@dataclass
class Fleet:
    deployment: Deployment
    security: dict[str, Any]
    whole: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Tokens by prompt and length, from before the first fault."""

    def client(self) -> AsyncClient:
        return AsyncClient(self.deployment.target, **self.security)

    @property
    def flags(self) -> list[str]:
        return ["--ca", "deploy/secrets/ca.crt"] if self.security else []

    def router(self) -> str:
        (name,) = self.deployment.containers("router")
        return name

    def workers(self) -> int:
        """Workers that the router has."""
        return int(self.deployment.metrics(self.router()).get("baton_workers", 0))

    def wait_for_workers(self) -> float:
        count = sum(len(self.deployment.containers(role)) for role in ("prefill", "decode"))
        try:
            return until(lambda: self.workers() == count, f"the router having {count} workers")
        except AssertionError as error:
            found = self.deployment.docker("exec", self.router(), "python3", "-c", REACHABLE)
            raise AssertionError(f"{error}; it has {self.workers()}, and can reach {found}") from None


@pytest.fixture(scope="module")
def transcript() -> list[str]:
    return []


@pytest.fixture(scope="module", params=["plain", "secure"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, transcript: list[str]
) -> Iterator[Fleet]:
    environment: dict[str, str] = {}
    security: dict[str, Any] = {}
    if request.param == "secure":
        folder = tmp_path_factory.mktemp("secrets")
        environment, key = secrets(folder)
        security = {"ca": folder / "ca.crt", "api_key": key}
    transcript.append(f"## {request.param.capitalize()}")
    deployment = Deployment(SECURE if security else PLAIN, environment, transcript)
    try:
        deployment.compose("up", "--build", "--wait", *SCALE)
        yield Fleet(deployment, security)
    finally:
        if logs := deployment.compose("logs", "--no-color", show=False):
            LOGS.mkdir(exist_ok=True)
            (LOGS / f"compose-{request.param}.log").write_text(logs)
        deployment.compose("--profile", "monitoring", "down", "--volumes", "--remove-orphans", show=False)


async def tokens(client: AsyncClient, prompt: str, count: int, begun: asyncio.Event | None = None) -> list[int]:
    """Greedy tokens of a stream; `begun` is set at the 16th."""
    found: list[int] = []
    async for delta in client.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True, timeout=300):
        found += [token.token_id for token in delta.tokens]
        if begun and len(found) >= 16:
            begun.set()
    return found


async def expect(fleet: Fleet, count: int) -> dict[str, list[int]]:
    """Right tokens of all prompts."""
    async with fleet.client() as client:
        for prompt in PROMPTS:
            if (prompt, count) not in fleet.whole:
                fleet.whole[prompt, count] = await tokens(client, prompt, count)
    return {prompt: fleet.whole[prompt, count] for prompt in PROMPTS}


@contextlib.asynccontextmanager
async def streams(fleet: Fleet) -> AsyncIterator[None]:
    """Long streams that are all under way when the block begins, and that all end with the right tokens after it."""
    right = await expect(fleet, LONG)
    begun = [asyncio.Event() for _ in PROMPTS]
    async with fleet.client() as client, asyncio.TaskGroup() as group:
        made = [
            group.create_task(tokens(client, prompt, LONG, event)) for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        yield
        found = await asyncio.gather(*made)
    assert found == list(right.values())


def test_the_fleet_is_healthy_and_has_one_image(fleet: Fleet) -> None:
    deployment = fleet.deployment
    deployment.compose("ps", "--format", "table {{.Name}}\t{{.Service}}\t{{.Status}}", output=True)
    names = deployment.containers()
    assert len(names) == 7
    assert all(deployment.healthy(name) for name in names)
    ours = [name for name in names if "redis" not in name]
    assert len({deployment.inspect(name)["Image"] for name in ours}) == 1
    assert fleet.wait_for_workers() < 30


def test_containers_have_no_rights_to_spare(fleet: Fleet) -> None:
    deployment = fleet.deployment
    for name in deployment.containers():
        found = deployment.inspect(name)
        host = found["HostConfig"]
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["Privileged"]) == (True, ["ALL"], False), name
        assert deployment.docker("exec", name, "id", "-u").strip() != "0", name
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
    compilers = "for tool in cc c++ gcc g++ clang ld make; do command -v $tool; done; true"
    assert deployment.docker("exec", fleet.router(), "sh", "-c", compilers) == ""
    assert found["HostConfig"]["Memory"] > 4 * 570 << 20, "the router's limit is below that of its tokenizers"


async def test_answers_over_http(fleet: Fleet) -> None:
    port = fleet.deployment.http_port
    async with fleet.client() as client:
        expected = await client.complete(EXAMPLE, max_tokens=18, temperature=0)
    scheme, verify = ("https", str(fleet.security["ca"])) if fleet.security else ("http", "")
    trusted = ssl.create_default_context(cafile=verify) if verify else True
    base, key = f"{scheme}://localhost:{port}/v1", fleet.security.get("api_key", "none")
    async with (
        httpx2.AsyncClient(verify=trusted) as transport,
        openai.AsyncOpenAI(base_url=base, api_key=key, http_client=transport) as client,
    ):
        (model,) = [each.id async for each in client.models.list()]
        done = await client.completions.create(model=model, prompt=EXAMPLE, max_tokens=18, temperature=0)
    assert done.choices[0].text == expected.text
    fleet.deployment.note(f"Over HTTP the answer is the same: {done.choices[0].text!r}")


async def test_answers(fleet: Fleet) -> None:
    deployment = fleet.deployment
    if fleet.security:
        os.environ["BATON_API_KEY"] = fleet.security["api_key"]
        with pytest.raises(Exception, match="key"):
            async with AsyncClient(deployment.target, ca=fleet.security["ca"]) as client:
                await client.complete("x", max_tokens=1)
    else:
        sampling = ("--max-tokens", "18", "--temperature", "0")
        deployment.baton("generate", "--target", deployment.target, EXAMPLE, *sampling)
    right = await expect(fleet, SHORT)
    assert all(len(found) == SHORT for found in right.values())
    async with fleet.client() as client:
        again = await asyncio.gather(*(tokens(client, prompt, SHORT) for prompt in PROMPTS))
    assert again == list(right.values())


async def test_a_crash_of_a_decode_worker_is_not_noticed(fleet: Fleet) -> None:
    deployment = fleet.deployment
    before = deployment.replays()
    (victim, *_) = deployment.containers("decode")
    async with streams(fleet):
        await asyncio.to_thread(deployment.crash, victim)
    replays = deployment.replays() - before
    assert replays > 0, "no stream was on the worker that died"
    back_s = until(lambda: deployment.healthy(victim), f"the restart of {victim}") + fleet.wait_for_workers()
    assert deployment.inspect(victim)["RestartCount"] == 1
    deployment.note(
        f"{victim} killed (SIGKILL) under {STREAMS} streams of {LONG} tokens: {replays:.0f} replays, all tokens right; "
        f"restarted by Docker, in use again after {back_s:.0f} s"
    )


async def test_a_cut_network_is_not_noticed(fleet: Fleet) -> None:
    deployment = fleet.deployment
    before = deployment.replays()
    (*_, victim) = deployment.containers("decode")
    async with streams(fleet):
        begin = time.monotonic()
        await asyncio.to_thread(deployment.docker, "network", "disconnect", NETWORK, victim, show=True)
    deployment.docker("network", "connect", "--alias", "decode", NETWORK, victim, show=True)
    replays = deployment.replays() - before
    assert replays > 0, "no stream was on the worker that was cut off"
    back_s = fleet.wait_for_workers()
    deployment.note(
        f"{victim} cut off under {STREAMS} streams of {LONG} tokens: {replays:.0f} replays, all tokens right, the last "
        f"stream ended {time.monotonic() - begin - back_s:.0f} s after the cut; in use again after {back_s:.0f} s"
    )


@dataclass
class Load:
    """Streams that follow each other until `stop`."""

    right: dict[str, list[int]]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    finished: int = 0
    refused: int = 0
    """Requests that got no token because the router was away; they are sent again."""

    async def run(self, client: AsyncClient, prompt: str) -> None:
        while not self.stop.is_set():
            begun = asyncio.Event()
            try:
                found = await tokens(client, prompt, SHORT, begun)
            except Unavailable:
                assert not begun.is_set(), "a stream broke"
                self.refused += 1
                await asyncio.sleep(0.2)
            else:
                assert found == self.right[prompt]
                self.finished += 1


async def test_a_restart_of_every_container_loses_no_stream(fleet: Fleet) -> None:
    deployment = fleet.deployment
    load = Load(await expect(fleet, SHORT))
    async with fleet.client() as client, asyncio.TaskGroup() as group:
        for prompt in PROMPTS:
            group.create_task(load.run(client, prompt))
        for name in deployment.containers():
            await asyncio.to_thread(deployment.docker, "stop", name)
            # Killed at the end of the grace period, it would have 137.
            assert deployment.inspect(name)["State"]["ExitCode"] == 0, name
            await asyncio.to_thread(deployment.docker, "start", name)
            await asyncio.to_thread(until, lambda name=name: deployment.healthy(name), f"the restart of {name}")
            await asyncio.to_thread(fleet.wait_for_workers)
            await asyncio.to_thread(until, lambda more=load.finished + 2: load.finished >= more, "two more streams")
        load.stop.set()
    deployment.note(
        f"each of {len(deployment.containers())} containers stopped and started under load: {load.finished} streams of "
        f"{SHORT} tokens finished, 0 lost, all tokens right; {load.refused} requests were refused while the one router "
        "was away, and sent again"
    )


def test_prometheus_scrapes_every_process(fleet: Fleet) -> None:
    image = "docker.io/prom/prometheus:v3.5.0"
    if fleet.security:
        pytest.skip("the ops listeners, which Prometheus scrapes, are the same without TLS")
    if not has_image(image):
        pytest.skip(f"{image} is not here, and tests pull no images")
    deployment = fleet.deployment
    deployment.compose("--profile", "monitoring", "up", "--detach", "--no-deps", "prometheus")
    port = deployment.compose("--profile", "monitoring", "port", "prometheus", "9090", show=False).strip()

    def up() -> dict[str, int]:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{port}/api/v1/targets", timeout=5) as answer:
            targets = json.load(answer)["data"]["activeTargets"]
            jobs = [target["labels"]["job"] for target in targets if target["health"] == "up"]
            return {job: jobs.count(job) for job in jobs}
        return {}

    took_s = until(
        lambda: up() == {"baton-router": 1, "baton-prefill": 2, "baton-decode": 3}, "a scrape of all processes"
    )
    deployment.note(f"Prometheus scrapes 6 processes after {took_s:.0f} s")


def test_down_leaves_nothing(fleet: Fleet) -> None:
    deployment = fleet.deployment
    deployment.compose("stop")
    for name in deployment.containers():
        assert deployment.inspect(name)["State"]["ExitCode"] == 0, name
    deployment.compose("--profile", "monitoring", "down", "--volumes")
    label = ("--filter", f"label=com.docker.compose.project={PROJECT}", "--quiet")
    kinds = (("container", "ls", "--all"), ("network", "ls"), ("volume", "ls"))
    left = [deployment.docker(*kind, *label) for kind in kinds]
    assert left == ["", "", ""]


def test_transcript(transcript: list[str]) -> None:
    """The last test: with all of the above it has something to write."""
    assert sum("finished, 0 lost" in line for line in transcript) == 2, "another test failed"
    docker = Deployment(PLAIN, {}, []).docker
    size = int(docker("image", "inspect", "--format", "{{.Size}}", IMAGE))
    server = docker("version", "--format", "{{.Server.Version}}").strip()
    python = docker("run", "--rm", IMAGE, "python3", "--version").split()[-1]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Docker {server}"
    text = f"""Written by `make test-compose` on {time.strftime("%Y-%m-%d")}: {machine}. The image has
{size / 1e9:.2f} GB, and Python {python}. Lines that begin with `#` are what the test observed: it compares every token
of every stream with those of the same prompt before the first fault. In the restarts, each service ended with status 0.
"""
    header = f"# A run of the Compose deployment\n\n{textwrap.fill(text, 100, break_on_hyphens=False)}\n"
    body = "".join(f"\n{part}\n" if part.startswith("##") else f"\n```console\n{part}```\n" for part in transcript)
    TRANSCRIPT.write_text((header + body).replace("```\n\n```console\n", "\n"))
