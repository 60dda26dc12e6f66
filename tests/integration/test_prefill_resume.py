"""A prefill worker is killed at 90% of a long prompt; another process resumes from the blocks in a real Valkey.

The client, over HTTP, sees nothing of it.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from types import SimpleNamespace

import openai
from openai.types import Completion

from baton.config.worker import PrefillConfig
from tests.checkpoints import greedy, load_reference, make_checkpoint, prompt_ids
from tests.fleet import Fleet, serving
from tests.redis_server import Server

CHUNK = 64
PROMPT = prompt_ids(3000)
HOLD = 9 * len(PROMPT) // 10
TOKENS = 12
LIMIT_S = 120


async def line(process: Process, word: str) -> list[str]:
    """The rest of the next line, which must begin with `word`."""
    first, *rest = (await process.stdout.readline()).decode().split()
    assert first == word
    return rest


async def killed_when_it_holds(workers: list[Process]) -> int:
    """SIGKILL the first worker that holds; returns the number of tokens that it had computed."""
    holding = [asyncio.create_task(line(worker, "holding")) for worker in workers]
    done, pending = await asyncio.wait(holding, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    (held,) = done
    workers[holding.index(held)].kill()
    return int(held.result()[0])


async def complete(base: str) -> Completion:
    """The greedy completion of the prompt over HTTP."""
    more = {"ignore_eos": True, "return_token_ids": True}
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        return await client.completions.create(
            model="m", prompt=PROMPT, max_tokens=TOKENS, temperature=0, extra_body=more
        )


async def test_a_long_prompt_is_resumed_by_another_worker(valkey: Server, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=4096)
    flags = [f"--model={checkpoint}", "--dtype=float32", "--threads=1", "--kv-memory=64MiB", f"--chunk-size={CHUNK}"]
    flags += [f"--redis={valkey.url}", "--cache-budget-s=60", "--served-model-name=m"]
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
        workers = []
        for _ in range(2):
            command = [sys.executable, "-m", "tests.holding_prefill", str(tmp_path / "marker"), str(HOLD), *flags]
            worker = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
            stack.push_async_callback(worker.wait)
            stack.callback(lambda worker=worker: worker.returncode is None and worker.kill())
            workers.append(worker)
        controls = [dict(pair.split("=") for pair in await line(worker, "listening"))["control"] for worker in workers]
        fleet = await stack.enter_async_context(Fleet(checkpoint, dtype="float32"))
        prefills = [SimpleNamespace(addresses=SimpleNamespace(control=control)) for control in controls]
        router = await fleet.start_router(prefills, [await fleet.decode()], http="127.0.0.1:0")
        await serving(router.address)
        asked = asyncio.create_task(complete(f"http://{router.http_address}/v1"))
        computed = await killed_when_it_holds(workers)
        answer = (await asked).model_dump()
    assert answer["choices"][0]["token_ids"] == greedy(load_reference(checkpoint), PROMPT, TOKENS).token_ids
    assert HOLD <= computed < HOLD + CHUNK
    # All but the chunk whose save may have been under way, and the rest of its last block.
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert computed - CHUNK - PrefillConfig().block_size < cached <= computed
