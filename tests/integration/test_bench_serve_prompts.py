"""`baton bench serve` with prompts from a file, a cap on what is open, and what caches had."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from baton.bundled import path as bundled_path
from baton.cli.bench.serve import serve
from tests import openai_server as behaviour
from tests.fleet import Fleet
from tests.integration.test_bench_serve import command
from tests.openai_server import choice, data, openai_server

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


HTTP = "http://a/v1/completions"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--concurrency=2", "--requests=1", "--max-concurrency=2"], "--max-concurrency is for --rate"),
        (["--rate=2", "--requests=1", "--max-concurrency=0"], "'--max-concurrency': 0 is not in the range"),
        (["--rate=2", "--prompt-file=/nowhere"], "'--prompt-file': '/nowhere'"),
        (["--rate=2", "--prompt-file=FILE", "--input-tokens=3"], "--input-tokens does not go with --prompt-file"),
        (["--rate=2", "--prompt-file=FILE", "--vocab-size=30"], "--vocab-size does not go with --prompt-file"),
        (["--rate=2", "--prompt-file=FILE", "--shared-prefix=3"], "--shared-prefix does not go with --prompt-file"),
        (["--rate=2", "--prompt-file=FILE", "--requests=1", "--seconds=1"], "give one of --requests, --seconds"),
        (["--rate=2", "--prompt-file=FILE"], "line 2: max_tokens: must be a whole number of at least 1, got 'x'"),
    ],
)
def test_bad_usage_is_refused_by_flag_and_value(flags: list[str], words: str, tmp_path: Path) -> None:
    file = prompts(tmp_path, {"text": "a"}, {"text": "b", "max_tokens": "x"}).removeprefix("--prompt-file=")
    done = CliRunner().invoke(serve, [HTTP, *(flag.replace("FILE", file) for flag in flags)])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
