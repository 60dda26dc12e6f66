"""Workers with different element types of KV: what decode converts is cached by nobody."""

from pathlib import Path

import pytest

from baton.telemetry.metrics import UNSHARED_TOKENS
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import SECRET, Fleet
from tests.metrics import count
from tests.redis_server import running as redis


@pytest.mark.parametrize("converts", [True, False])
async def test_what_a_converting_worker_decodes_is_left_to_nobody(converts: bool, tmp_path: Path) -> None:
    """Its blocks would have the names of KV that was computed from a context in its own element type."""
    with redis("valkey", tmp_path) as server:
        async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32", fleet_secret=SECRET) as fleet:
            prefill = await fleet.prefill(kv_dtype="bfloat16" if converts else "float32", redis="none")
            worker = await fleet.decode(redis=server.url, convert_kv=converts)
            client, unshared = await fleet.router([prefill], [worker]), count(UNSHARED_TOKENS)
            await client.complete(prompt_ids(100), max_tokens=40, temperature=0, ignore_eos=True)
            await worker.service.drain(5)
            await worker.cache.flush()
            shared = (server.client().dbsize() > 0, worker.engine.stats().cached > 0)
            assert shared == (not converts, not converts)
            assert count(UNSHARED_TOKENS) - unshared == (100 if converts else 0)
