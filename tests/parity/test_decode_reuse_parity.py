"""A decode worker that keeps what it holds: fewer bytes moved, the same tokens, with a real model in float32."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.config.worker import DecodeConfig
from baton.engine.config import EngineConfig
from baton.engine.factory import build
from baton.pb import inference_pb2
from baton.request import SamplingParams
from baton.rpc.server import listen
from baton.telemetry.metrics import REUSED_TOKENS, TRANSFER_BYTES
from baton.transfer.transport import SERVICE, KvServicer
from decode_svc.app import run
from tests.checkpoints import prompt_ids
from tests.decode_rig import Exporter, Rig, SessionRouter
from tests.decoding import digests
from tests.metrics import count

BLOCK = 16
MEMORY = 16 << 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True, n=3)


@contextlib.asynccontextmanager
async def worker(checkpoint: Path, **settings: Any) -> AsyncIterator[tuple[Rig, SessionRouter]]:
    """A decode worker with a real model, an exporter with another, and a session."""
    common: dict[str, Any] = {"model": str(checkpoint), "dtype": "float32", "threads": 1, "kv_memory": MEMORY}
    exporter = Exporter(await asyncio.to_thread(build, EngineConfig(**common)))
    async with contextlib.AsyncExitStack() as stack:
        listening = listen(
            "127.0.0.1:0", insecure=False, add=KvServicer(exporter.exports).add_to_server, services=[SERVICE]
        )
        exporter.address = (await stack.enter_async_context(listening)).address
        app = await stack.enter_async_context(run(DecodeConfig(**common | settings)))
        async with contextlib.AsyncExitStack() as sessions:
            rig = Rig(app, app.engine, exporter, sessions)  # type: ignore[arg-type]
            yield rig, await rig.router()
        exporter.exports.close()
        assert app.engine.audit() == {}


async def ask(
    rig: Rig, router: SessionRouter, name: str, prompt: Sequence[int], params: SamplingParams, *, off: bool = False
) -> tuple[list[list[int]], int, int]:
    """The tokens of each choice, those that were pinned, and the tokens whose KV was moved."""
    received = TRANSFER_BYTES.labels("received")
    before = count(received)
    cache: dict[str, Any] = {"prefix_digests": b"".join(digests(rig.app.engine, prompt))}
    if off:
        cache = {"cache": inference_pb2.CACHE_POLICY_OFF}
    await router.request(name, prompt, params, range(params.n), **cache)
    await router.until_finished(*((name, choice) for choice in range(params.n)))
    moved = count(received) - before
    tokens = [router.tokens[name, choice] for choice in range(params.n)]
    return tokens, router.reserved[name].cached_tokens, int(moved) // rig.app.engine.spec.kv_format.token_bytes


@pytest.mark.parametrize("page_size", [16, 32, 256])
async def test_a_conversation_moves_only_new_kv_and_keeps_its_tokens(checkpoint: Path, page_size: int) -> None:
    async with worker(checkpoint, page_size=page_size) as (rig, router):
        ids, reused = prompt_ids(250), count(REUSED_TOKENS)
        held = 0
        for turn in range(3):
            (expected,), none, whole = await ask(rig, router, f"plain{turn}", ids, GREEDY, off=True)
            (tokens,), cached, moved = await ask(rig, router, f"turn{turn}", ids, GREEDY)
            assert tokens == expected
            assert (none, whole) == (0, len(ids))
            assert (cached, moved) == (held, len(ids) - held)
            held = (len(ids) + len(tokens) - 1) // BLOCK * BLOCK
            ids = [*ids, *tokens, *prompt_ids(9, seed=turn)]
        assert count(REUSED_TOKENS) > reused


async def test_choices_of_a_pinned_prompt_keep_their_tokens_and_leave_them(checkpoint: Path) -> None:
    async with worker(checkpoint) as (rig, router):
        prompt = prompt_ids(70)
        expected, _, _ = await ask(rig, router, "plain", prompt, SEEDED, off=True)
        first, _, _ = await ask(rig, router, "first", prompt, SEEDED)
        again, cached, moved = await ask(rig, router, "again", prompt, SEEDED)
        assert first == again == expected
        assert (cached, moved) == (64, 6)
        for choice, tokens in enumerate(first):
            ids = [*prompt, *tokens, 1]
            (plain,), _, _ = await ask(rig, router, f"plain{choice}", ids, GREEDY, off=True)
            (found,), cached, moved = await ask(rig, router, f"next{choice}", ids, GREEDY)
            assert found == plain
            assert (cached, moved) == (80, 11)
