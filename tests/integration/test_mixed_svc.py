"""A mixed worker over real gRPC: prompts in place, prompts for others and of others, and both in one pass."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.config.worker import DecodeConfig, MixedConfig, PrefillConfig
from baton.request import SamplingParams
from baton.telemetry.metrics import TRANSFER_BYTES
from decode_svc.app import run as run_decode
from mixed_svc.app import run
from prefill_svc.app import run as run_prefill
from tests.checkpoints import lively_prompt, load_reference
from tests.metrics import count
from tests.mixed_rig import Worker, Workers

TOKENS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts of several lengths, with the tokens of transformers."""
    model = load_reference(checkpoint)
    found = [lively_prompt(model, length, TOKENS) for length in (3, 16, 33, 64, 130)]
    return [(prompt, reference.token_ids) for prompt, reference in found]


class Fleet:
    """Workers of one checkpoint in float32."""

    def __init__(self, checkpoint: Path, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._settings: dict[str, Any] = {
            "model": str(checkpoint),
            "dtype": "float32",
            "threads": 1,
            "kv_memory": 16 << 20,
            "cache_budget_s": 60.0,
        }
        self.workers = Workers(stack)
        self.engines: list[Any] = []

    async def mixed(self, **settings: Any) -> Worker:
        return await self._start(run(MixedConfig(**self._settings | settings)), decodes=True)

    async def prefill(self, **settings: Any) -> Worker:
        return await self._start(run_prefill(PrefillConfig(**self._settings | settings)), decodes=False)

    async def decode(self, **settings: Any) -> Worker:
        return await self._start(run_decode(DecodeConfig(**self._settings | settings)), decodes=True)

    async def _start(self, running: Any, *, decodes: bool) -> Worker:
        app = await self._stack.enter_async_context(running)
        self.engines.append(app.engine)
        return await self.workers.connect(app, decodes=decodes)


@contextlib.asynccontextmanager
async def fleet(checkpoint: Path) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        made = Fleet(checkpoint, stack)
        yield made
    assert [engine.audit() for engine in made.engines] == [{} for _ in made.engines]


async def test_prompts_in_place_equal_generate(checkpoint: Path, expected: list[tuple[list[int], list[int]]]) -> None:
    async with fleet(checkpoint) as made:
        moved = count(TRANSFER_BYTES.labels("received"))
        worker = await made.mixed()
        for prompt, tokens in expected:
            answer = await made.workers.complete(worker, worker, prompt, GREEDY)
            assert answer.tokens == [tokens]
            assert answer.fetch_ms == 0
        assert count(TRANSFER_BYTES.labels("received")) == moved
