"""Streams whose events are timed, `vllm bench serve` as a process, percentiles."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench import load
from bench.children import ChildFailed

PROMPT = [1, 2, 3]


def served(*events: Any, status: int = 200) -> httpx2.AsyncClient:
    """A client of a server that answers with these events."""
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)

    def answer(request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        assert (body["model"], body["prompt"], body["max_tokens"]) == (load.MODEL, PROMPT, 3)
        assert (body["stream"], body["ignore_eos"], body["temperature"]) == (True, True, 0)
        return httpx2.Response(status, text=f": ping\n\n{text}data: [DONE]\n\n")

    return httpx2.AsyncClient(base_url="http://server", transport=httpx2.MockTransport(answer))


def tokens(count: int) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": [7] * count}]}


async def test_events_with_tokens_are_timed() -> None:
    times: list[float] = []
    async with served(tokens(1), tokens(2), tokens(0), {"choices": [], "usage": {}}) as client:
        await load.stream(client, PROMPT, 3, times)
    assert len(times) == 2
    assert times[0] <= times[1]


@pytest.mark.parametrize(
    ("events", "status", "words"),
    [
        ([tokens(1)], 200, "the stream ended after 1 of 3 tokens"),
        ([tokens(1), {"error": {"message": "the engine died"}}], 200, "the engine died"),
        ([{"error": "full"}], 429, "status 429(?s:.*)full"),
    ],
)
async def test_a_stream_without_all_tokens_is_an_error(events: list[Any], status: int, words: str) -> None:
    async with served(*events, status=status) as client:
        with pytest.raises(RuntimeError, match=words):
            await load.stream(client, PROMPT, 3, [])


def python(folder: Path, body: str) -> Path:
    """An interpreter that runs `body` in place of its script; `flags` are the arguments."""
    file = folder / "python"
    start = "import json, sys\nflags = dict(each[2:].partition('=')[::2] for each in sys.argv[3:])\n"
    file.write_text(f"#!{sys.executable}\n{start}{body}\n")
    file.chmod(0o755)
    return file


WRITES = "json.dump(%s, open(f'{flags[\"result-dir\"]}/{flags[\"result-filename\"]}', 'w'))"


def test_the_result_of_vllm_is_read(tmp_path: Path) -> None:
    found = load.bench_serve(python(tmp_path, WRITES % "{'completed': 1, 'flags': flags}"), "--seed=3")
    flags = found["flags"]
    assert (flags["seed"], flags["model"], flags["temperature"]) == ("3", load.MODEL, "0")
    assert {"ignore-eos", "save-detailed"} <= flags.keys()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit('no such server')", "no such server"),
        (WRITES % "{'completed': 0, 'errors': ['', 'it fell over']}", "no request finished: it fell over"),
    ],
)
def test_a_run_that_fails_is_an_error(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match=words):
        load.bench_serve(python(tmp_path, body))


def test_percentiles_are_nearest_ranks() -> None:
    values = list(range(1, 101))
    shares = (0.0, 0.01, 0.07, 0.5, 0.9, 0.99, 1.0)
    assert [load.percentile(values, share) for share in shares] == [1, 1, 7, 50, 90, 99, 100]
    assert load.percentile([3, 1, 2], 0.5) == 2
