"""`baton bench serve` against a real fleet, and against OpenAI-shaped servers that misbehave or want certificates."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
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
from baton.cli.main import main
from baton.errors import ConfigError, InvalidRequest
from tests import certificates
from tests import openai_server as behaviour
from tests.fake_router import Router, served
from tests.fleet import Fleet
from tests.integration.secure_fleet import secure_fleet
from tests.openai_server import choice, data, openai_server

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


async def test_the_body_sent_to_the_server_can_be_changed(tmp_path: Path) -> None:
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


HTTP = "http://a/v1/completions"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([HTTP, "--requests=1"], "give one of --rate, --concurrency"),
        ([HTTP, "--rate=1", "--concurrency=2", "--requests=1"], "give one of --rate"),
        ([HTTP, "--rate=1"], "give one of --requests, --seconds"),
        ([HTTP, "--rate=-1", "--requests=1"], "--rate"),
        ([HTTP, "--concurrency=1.5", "--requests=1"], "whole numbers"),
        ([HTTP, "--concurrency=2", "--requests=1", "--max-concurrency=2"], "--max-concurrency is for --rate"),
        (["http://a/v1/chat/completions", "--rate=1", "--requests=1"], "give the server's /v1/completions"),
        (["a:1", "--rate=1", "--requests=1"], "must be grpc://HOST:PORT or http"),
        (["grpc://a:1", "--rate=1", "--requests=1", '--body={"a": 1}'], "--tokenizer and --body are for http://"),
        ([HTTP, "--rate=1", "--requests=1", "--connections=2"], "--connections is for grpc://"),
        ([HTTP, "--rate=1", "--requests=1", "--shared-prefix=1:2:3"], "TOKENS[:GROUPS]"),
        ([HTTP, "--rate=2", "--prompt-file=FILE", "--input-tokens=3"], "does not go with --prompt-file"),
        ([HTTP, "--rate=2", "--prompt-file=FILE"], "line 2: max_tokens: must be a whole number of at least 1, got 'x'"),
    ],
)
def test_bad_usage_is_refused_by_flag_and_value(flags: list[str], words: str, tmp_path: Path) -> None:
    file = prompts(tmp_path, {"text": "a"}, {"text": "b", "max_tokens": "x"}).removeprefix("--prompt-file=")
    done = CliRunner().invoke(main, ["bench", "serve", *(flag.replace("FILE", file) for flag in flags)])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


TEXT = "It is a truth universally acknowledged, that a prompt which is sent twice must be in want of a cache. " * 4


def prompts(tmp_path: Path, *lines: Any) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return f"--prompt-file={file}"


async def test_prompts_of_a_file_reach_a_fleet_and_hits_are_told(tmp_path: Path) -> None:
    lines = [
        {"text": TEXT, "max_tokens": 3},
        {"text": TEXT, "max_tokens": 3},
        {"text": TEXT, "max_tokens": 3, "cache_salt": "other"},
        {"token_ids": list(range(100, 180)), "output_tokens": 4},
        {"prompt": list(range(100, 180))},
    ]
    async with Fleet(bundled_path(), dtype="float32") as fleet:
        app = await fleet.start_router([await fleet.prefill()], [await fleet.decode()])
        client = await fleet.client(app)
        text_tokens = len(await client.tokenize(TEXT))
        flags = [prompts(tmp_path, *lines), "--concurrency=1", "--output-tokens=2", "--warmup=1", "--wait=60"]
        status, out, err = await command("serve", f"grpc://{app.address}", *flags, f"--json={tmp_path / 'a'}")
        assert status == 0, err
        found = json.loads((tmp_path / "a").read_text())
        asked = [await client.complete(TEXT, max_tokens=1, cache_salt=salt) for salt in ("", "third")]
        lines[1] = {"token_ids": [1, 5000]}
        unknown, _, said = await command("serve", f"grpc://{app.address}", prompts(tmp_path, *lines), *flags[1:])
    assert (unknown, "'--prompt-file': line 2: token id 5000 must be below 4096" in said) == (2, True)
    assert found["requests"]["finished"] == 5
    assert found["output_tokens"] == 3 * 3 + 4 + 2
    assert found["input_tokens"] == 3 * text_tokens + 2 * 80
    # The same text has cached tokens, and none come from another salt or from the warm-up.
    same, other = (each.usage.cached_tokens for each in asked if each.usage)
    assert other == 0 < same
    assert same <= found["cached_tokens"] < same + 80
    assert found["cached_share"] == round(found["cached_tokens"] / found["input_tokens"], 4)
    assert f"cached     {found['cached_tokens']} prompt tokens" in out
    assert (found["workload"]["prompt_file"], found["workload"]["prompts"]) == ("prompts.jsonl", 5)


def telling(*cached: int | None) -> list[behaviour.Stream]:
    """Servers that count text as 10 tokens, and tell how many of them were cached."""

    def stream(tokens: int | None) -> behaviour.Stream:
        async def streams(body: dict[str, Any]) -> AsyncIterator[bytes]:
            count = body["max_tokens"]
            yield data(choice("", "length", token_ids=[behaviour.TOKEN] * count))
            details = None if tokens is None else {"cached_tokens": tokens}
            usage = {"prompt_tokens": 10, "completion_tokens": count, "prompt_tokens_details": details}
            yield data({"choices": [], "usage": usage}) + data(b"[DONE]")

        return streams

    return [stream(each) for each in cached]


async def test_texts_reach_other_servers_as_texts(tmp_path: Path) -> None:
    lines = [{"prompt": "a b", "max_tokens": 2}, {"text": "c", "cache_salt": "s"}, {"prompt": "d"}]
    async with openai_server(*telling(None, None, 8, None)) as server:
        flags = [prompts(tmp_path, *lines), "--concurrency=1", "--output-tokens=3"]
        status, out, err = await command("serve", server.url, *flags, f"--json={tmp_path / 'a'}")
    assert status == 0, err
    # The first finds out whether the server is there; one that takes no token ids takes it too.
    asked = [(body["prompt"], body["max_tokens"], body.get("cache_salt")) for body in server.bodies]
    assert asked == [("Hello", 1, None), ("a b", 2, None), ("c", 3, "s"), ("d", 3, None)]
    found = json.loads((tmp_path / "a").read_text())
    assert (found["input_tokens"], found["cached_tokens"], found["cached_share"]) == (30, 8, 0.2667)
    assert "cached     8 prompt tokens, 26.7%" in out


OURS, THEIRS = certificates.fleet(), certificates.fleet("theirs")
OWN = {"ca": OURS / "ca.crt", "cert": OURS / "client.crt", "key": OURS / "client.key"}
RUN = ["--concurrency=2", "--requests=4", "--input-tokens=8", "--output-tokens=3", "--vocab-size=200", "--json=-"]


async def measured(target: str, reach: Mapping[str, Any]) -> str:
    """The report of `baton bench serve`, of whose requests all finish."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in reach.items()]
    status, out, err = await command("serve", target, *RUN, *given)
    assert status == 0, err
    assert json.loads(out)["requests"]["finished"] == 4
    return out


async def refused(url: str, reach: Mapping[str, Any]) -> str:
    """The kind of failure that a run with these credentials ends with."""
    with pytest.raises(RequestFailed) as caught:
        await one(settings(url, endpoint=Endpoint(url, model="m", reach=reach, connections=2), requests=1))
    return caught.value.kind


async def test_a_router_that_wants_keys_and_certificates(tmp_path: Path) -> None:
    async with secure_fleet(tmp_path, client_certs=True) as running:
        url = f"grpc://{running.app.address}"
        given = {**OWN, "api_key": running.keys["beta"], "server_name": "router.baton"}
        assert given["api_key"] not in await measured(url, given)  # type: ignore[operator]
        assert await refused(url, given | {"api_key": None}) == "Unauthenticated"
        for wrong in (
            {"cert": None, "key": None},
            {"cert": THEIRS / "client.crt", "key": THEIRS / "client.key"},
            {"ca": THEIRS / "ca.crt"},
            {"server_name": "elsewhere.example"},
        ):
            assert await refused(url, given | wrong) == "Unavailable"
        with pytest.raises(ConfigError, match="key: is missing"):
            await refused(url, given | {"key": None})


async def test_an_http_server_that_wants_certificates() -> None:
    async with openai_server(behaviour.with_ids, tls=certificates.settings(OURS, "router")) as server:
        await measured(server.url, {**OWN, "api_key": "sesame"})
        assert server.headers[-1]["authorization"] == "Bearer sesame"
        asked = len(server.bodies)
        for reach in (
            {"ca": OURS / "ca.crt"},
            {**OWN, "ca": THEIRS / "ca.crt"},
            {**OWN, "server_name": "elsewhere.example"},
        ):
            assert await refused(server.url, reach) in ("connection", "connection lost")
        assert len(server.bodies) == asked
