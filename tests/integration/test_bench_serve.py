"""`baton bench serve` against a real fleet, and against an OpenAI-shaped server that misbehaves."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from baton.bench.load.outcome import Outcome, RequestFailed
from baton.bench.load.session import Load, LoadSettings, connect, measure
from baton.bench.load.targets import Endpoint
from baton.bench.load.workload import Job, lengths
from baton.bundled import path as bundled_path
from baton.errors import InvalidRequest
from tests import openai_server as behaviour
from tests.fake_router import Router, served
from tests.fleet import Fleet
from tests.openai_server import openai_server

BATON = [sys.executable, "-m", "baton", "bench"]
QUIET = Console(quiet=True)
FIRST = behaviour.with_ids
"""Answer to the small request before a run."""


def settings(url: str, **more: Any) -> LoadSettings:
    made = LoadSettings(
        Endpoint(url, model="m"),
        [Load(concurrency=2)],
        requests=6,
        inputs=lengths("5"),
        outputs=lengths("4"),
        timeout_s=20.0,
    )
    return replace(made, **more)


async def one(wanted: LoadSettings) -> dict[str, Any]:
    found = [each async for each in measure(wanted, QUIET)]
    assert len(found) == 1
    return found[0]


async def command(*arguments: str, interrupt: asyncio.Event | None = None) -> tuple[int, str, str]:
    """Run `baton bench`, with Ctrl-C when `interrupt` is set: exit status, standard output and error."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*BATON, *arguments, stdout=pipe, stderr=pipe)
    try:
        if interrupt is not None:
            await asyncio.wait_for(interrupt.wait(), 60)
            process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_fleet_under_load(tmp_path: Path) -> None:
    async with Fleet(bundled_path(), dtype="float32") as fleet:
        app = await fleet.start_router([await fleet.prefill()], [await fleet.decode()])
        flags = ["--rates=20,40", "--requests=6", "--input-tokens=uniform:8:24", "--output-tokens=5", "--warmup=2"]
        more = ["--max-concurrency=8", "--shared-prefix=16:2", f"--json={tmp_path / 'a.json'}", "--wait=60"]
        status, out, err = await command("serve", f"grpc://{app.address}", *flags, *more)
    assert status == 0, err
    assert "6 sent, 6 finished" in out
    found = json.loads((tmp_path / "a.json").read_text())
    assert [each["workload"]["rate"] for each in found] == [20.0, 40.0]
    for each in found:
        assert each["requests"] == {"sent": 6, "finished": 6, "failed": 0, "refused": 0, "interrupted": 0}
        assert each["output_tokens"] == 30
        assert each["workload"]["max_concurrency"] == 8
        assert 6 * (16 + 8) <= each["input_tokens"] <= 6 * (16 + 24)
        assert each["workload"]["vocab_size"] == 4096
        assert 0 < each["ttft_ms"]["p50"] <= each["e2e_ms"]["p50"] <= each["e2e_ms"]["max"] < 1e3 * each["seconds"]


async def test_refusals_and_bad_requests_have_the_names_of_batons_errors() -> None:
    router = Router()
    async with served(router) as listener:
        url = f"grpc://{listener.address}"
        with pytest.raises(RequestFailed, match="is not served") as refused:
            await one(settings(url, endpoint=Endpoint(url, model="other")))
        assert refused.value.kind == "NotFound"
        router.error = InvalidRequest("prompt", "is too long")
        with pytest.raises(RequestFailed, match="is too long") as failed:
            await one(settings(url))
        assert failed.value.kind == "InvalidRequest"


@pytest.mark.parametrize(
    ("stream", "counts"),
    [
        (behaviour.with_ids, [1, 1, 1, 1]),
        (behaviour.in_pairs, [2, 2]),
        (behaviour.as_text, [1, 1, 1, 1]),
        (behaviour.merged, [1, 1]),
        (behaviour.no_text, [1]),
    ],
)
async def test_tokens_are_counted_as_each_kind_of_server_tells(stream: behaviour.Stream, counts: list[int]) -> None:
    # The small request asks for one token, which no pair can be.
    async with openai_server(*[FIRST, *[stream] * 7]) as server:
        found = await one(settings(server.url))
        job = Job([1, 2, 3], 4)
        outcome = Outcome.of(job, 0.0)
        async with connect(Endpoint(server.url, model="m")) as target:
            await target.send(job, outcome)
    assert list(outcome.counts) == counts
    assert found["requests"]["finished"] == 6, found["failures"]
    assert found["output_tokens"] == 24
    assert found["ttft_ms"]["max"] > 0
    assert server.most_open <= 2
    body = server.bodies[1]
    assert (body["model"], body["max_tokens"], len(body["prompt"])) == ("m", 4, 5)
    assert (body["stream"], body["ignore_eos"], body["temperature"]) == (True, True, 0)


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (behaviour.malformed, "bad event", "JSONDecodeError"),
        (behaviour.of_another_shape, "bad event", "[1, 2]"),
        (behaviour.says_error, "error event", "the engine died"),
        (behaviour.cut, "cut short", "after 1 tokens"),
        (behaviour.dies, "connection lost", ""),
        (behaviour.stops_early, "short output", "1 tokens instead of 4, finish_reason 'stop'"),
        (500, "http 500", "status 500"),
        (429, "http 429", "status 429"),
    ],
)
async def test_each_failure_is_counted_by_its_kind(wrong: behaviour.Stream | int, kind: str, words: str) -> None:
    async with openai_server(FIRST, wrong, FIRST) as server:
        found = await one(settings(server.url, requests=7))
    requests, name = found["requests"], "refused" if wrong == 429 else "failed"
    assert (requests["sent"], requests["finished"], requests[name]) == (7, 4, 3)
    assert found["failures"][kind]["count"] == 3
    assert words in found["failures"][kind]["example"]


async def test_a_slow_start_is_waited_for_and_no_start_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1/completions"
    with pytest.raises(RequestFailed) as error:
        await one(settings(url, wait_s=0.3))
    assert error.value.kind == "connection"
    running = asyncio.create_task(one(settings(url, wait_s=30.0)))
    await asyncio.sleep(0.3)
    # Loading, as vLLM's frontends say 503 while they do.
    async with openai_server(503, 503, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, FIRST, port=port):
        assert (await running)["requests"]["finished"] >= 4


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    waiting, all_sent = [], asyncio.Event()

    async def together(body: dict[str, Any]) -> AsyncIterator[bytes]:
        waiting.append(body)
        if len(waiting) == 20:
            all_sent.set()
        await all_sent.wait()
        async for piece in FIRST(body):
            yield piece

    async with openai_server(*[FIRST, *[together] * 20]) as server:
        found = await one(settings(server.url, loads=[Load(rate=200.0)], requests=20, timeout_s=60.0))
    assert found["requests"]["finished"] == server.most_open == 20


async def test_ctrl_c_reports_what_was_measured(tmp_path: Path) -> None:
    begun, hanging = asyncio.Event(), []

    async def hangs(body: dict[str, Any]) -> AsyncIterator[bytes]:
        hanging.append(body)
        if len(hanging) == 2:
            begun.set()
        async for piece in behaviour.hangs(body):
            yield piece

    async with openai_server(*[FIRST] * 5, *[hangs] * 50) as server:
        flags = ["--concurrency=2", "--seconds=600", f"--json={tmp_path / 'a'}"]
        status, out, err = await command("serve", server.url, *flags, interrupt=begun)
    assert status == 130, err
    found = json.loads((tmp_path / "a").read_text())
    assert found["interrupted"]
    assert found["requests"] == {"sent": 6, "finished": 4, "failed": 0, "refused": 0, "interrupted": 2}
    assert "4 finished, 2 interrupted" in out


async def test_what_the_server_is_sent_can_be_changed(tmp_path: Path) -> None:
    body = '{"ignore_eos": null, "min_tokens": 4}'
    flags = ["--concurrency=1", "--requests=2", f"--body={body}", f"--tokenizer={bundled_path()}", "--api-key=sesame"]
    async with openai_server(FIRST) as server:
        status, out, err = await command("serve", server.url, *flags, "--json=-")
    assert status == 0, err
    assert json.loads(out)["requests"]["finished"] == 2
    assert isinstance(server.bodies[-1]["prompt"], str)
    assert server.bodies[-1]["min_tokens"] == 4
    assert "ignore_eos" not in server.bodies[-1]
    assert server.headers[-1]["authorization"] == "Bearer sesame"


async def test_the_key_of_the_environment_is_for_baton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "sesame")
    async with openai_server(FIRST) as server:
        status, _, err = await command("serve", server.url, "--concurrency=1", "--requests=1")
    assert status == 0, err
    assert not any("authorization" in headers for headers in server.headers)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["http://a/v1/completions"], "give one of --rate, --concurrency"),
        (["http://a/v1/completions", "--rate=1", "--concurrency=2", "--requests=1"], "give one of --rate"),
        (["http://a/v1/completions", "--rate=1"], "give one of --requests, --seconds"),
        (["http://a/v1/completions", "--rate=-1", "--requests=1"], "--rate"),
        (["http://a/v1/completions", "--concurrency=1.5", "--requests=1"], "whole numbers"),
        (["http://a/v1/chat/completions", "--rate=1", "--requests=1"], "give the server's /v1/completions"),
        (["grpc://a", "--rate=1", "--requests=1"], "TARGET"),
        (["a:1", "--rate=1", "--requests=1"], "must be grpc://HOST:PORT or http"),
        (["grpc://a:1", "--rate=1", "--requests=1", '--body={"a": 1}'], "--tokenizer and --body are for http://"),
        (["http://a/v1/completions", "--rate=1", "--requests=1", "--connections=2"], "--connections is for grpc://"),
        (["http://a/v1/completions", "--rate=1", "--requests=1", "--input-tokens=x"], "--input-tokens"),
        (["http://a/v1/completions", "--rate=1", "--requests=1", "--shared-prefix=1:2:3"], "TOKENS[:GROUPS]"),
    ],
)
def test_bad_usage_is_refused_by_flag_and_value(flags: list[str], words: str) -> None:
    from baton.cli.bench.serve import serve

    done = CliRunner().invoke(serve, flags)
    assert done.exit_code == 2
    assert words in done.output


async def test_what_does_not_serve_is_said_in_a_line() -> None:
    async with openai_server(404) as server:
        status, out, err = await command("serve", server.url, "--rate=1", "--requests=1")
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {server.url} does not serve: http 404:")
