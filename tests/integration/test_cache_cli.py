"""`baton cache` against a small fleet and a real Valkey: prompts are warmed, counted, found and cleared."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from baton.cli.main import main
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import SECRET, Fleet, serving
from tests.redis_server import running

BLOCK = 16
SHARED = 5


async def cache(*arguments: str) -> Any:
    invoke = partial(CliRunner().invoke, main, ["cache", *arguments, "--json"])
    result = await asyncio.to_thread(invoke)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def tiers(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {tier["name"]: tier for tier in report["tiers"]}


async def test_prompts_are_warmed_counted_found_and_cleared(tmp_path: Path) -> None:
    shared, file = prompt_ids(SHARED * BLOCK), tmp_path / "prompts.jsonl"
    prompts = [[*shared, *prompt_ids(length, seed=length)] for length in (8, 24)]
    file.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in prompts))
    with running("valkey", tmp_path, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        settings = {"dtype": "float32", "redis": server.url, "fleet_secret": SECRET}
        async with Fleet(make_checkpoint("llama", tmp_path / "model"), **settings) as fleet:
            prefill = await fleet.prefill(kv_home="host", host_memory=64 << 20)
            decode = await fleet.decode()
            router = await fleet.start_router([prefill], [decode], fleet_secret=SECRET)
            await serving(router.address)
            client = await fleet.client(router)
            workers = f"--target={prefill.addresses.control},{decode.addresses.control}"
            warm = ("warm", f"--target={router.address}", f"--prompt-file={file}", "--concurrency=1")

            cold = await cache(*warm)
            # The second prompt begins with what the first has left.
            assert [each["usage"]["cached_tokens"] for each in cold] == [0, SHARED * BLOCK]
            hot = await cache(*warm)
            for each, ids in zip(hot, prompts, strict=True):
                assert (len(ids) - 1) // BLOCK * BLOCK <= each["usage"]["cached_tokens"] < len(ids)
            assert all(each["error"] is None for each in (*cold, *hot))

            await prefill.worker.wait_finished()
            await prefill.cache.flush()
            held, of_decode, known = await cache("stats", workers, f"--target={router.address}")
            assert [held["role"], of_decode["role"], known["role"]] == ["prefill", "decode", "router"]
            assert [*tiers(held)] == ["pool", "host", "redis"]
            assert [*tiers(of_decode)] == ["pool", "redis"]
            blocks = max(map(len, prompts)) // BLOCK
            assert tiers(held)["pool"]["blocks"] >= blocks
            assert tiers(held)["pool"]["bytes"] <= tiers(held)["pool"]["capacity_bytes"]
            with server.client() as redis:
                assert blocks <= redis.dbsize() == tiers(held)["redis"]["blocks"]
            assert tiers(held)["redis"]["capacity_bytes"] == 64 << 20
            assert tiers(known)["index"]["blocks"] >= blocks

            only = await cache("clear", f"--target={prefill.addresses.control}", "--yes")
            assert tiers(only[0])["pool"]["blocks"] >= blocks
            again = await cache(*warm)
            assert again[0]["usage"]["cached"]["redis"] > 0, "Redis was spared"

            await prefill.worker.wait_finished()
            await prefill.cache.flush()
            cleared = await cache("clear", workers, "--yes", "--redis")
            assert sum(tiers(report)["redis"]["blocks"] for report in cleared) >= blocks
            with server.client() as redis:
                assert redis.dbsize() == 0
            for report in await cache("stats", workers):
                assert not any(tier["blocks"] for tier in report["tiers"]), report
            assert [each["usage"]["cached_tokens"] for each in await cache(*warm)] == [0, SHARED * BLOCK]

            # With more than one token decode holds the prompt too, once its first sequence has ended there.
            for _ in range(20):
                answer = await client.complete(prompts[0], max_tokens=2, temperature=0)
                if answer.usage is not None and answer.usage.cached.decode:
                    break
            (of_decode,) = await cache("stats", f"--target={decode.addresses.control}")
            assert tiers(of_decode)["pool"]["hits"] >= len(prompts[0]) // BLOCK
