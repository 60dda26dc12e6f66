"""Limits on what a request may hold: each is refused by name and value, and what is just within is served.

Limits that depend on the model's length or vocabulary are in test_router_refusals.
"""

from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import bundled
from baton.engine.fake import FakeEngine
from baton.errors import InvalidRequest
from baton.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from baton.rpc.channel import METADATA_BYTES, METADATA_MAX_BYTES
from router.serving.validator import largest_message
from tests.fleet import Fleet
from tests.integration.router_rig import refused, request, router_rig, whole
from tests.integration.router_stubs import MAX_MODEL_LEN

LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "n": ({"n": MAX_CHOICES}, {"n": MAX_CHOICES + 1}, "n: must be in [1, 64], got 65"),
    "stop": (
        {"stop": ["#"] * MAX_STOP_STRINGS},
        {"stop": ["#"] * (MAX_STOP_STRINGS + 1)},
        "stop: at most 64 strings are allowed, got 65",
    ),
    "stop length": (
        {"stop": ["#" * MAX_STOP_LENGTH]},
        {"stop": ["x", "#" * (MAX_STOP_LENGTH + 1)]},
        "stop[1]: must have 1 to 1024 characters, got '###",
    ),
    "stop characters": (
        {"stop": ["#" * 1024] * 4},
        {"stop": ["#" * 1024] * 4 + ["x"]},
        "stop: may have at most 4096 characters in all, got 4097",
    ),
    "stop_token_ids": (
        {"stop_token_ids": [299] * MAX_STOP_TOKEN_IDS},
        {"stop_token_ids": [299] * (MAX_STOP_TOKEN_IDS + 1)},
        "stop_token_ids: at most 1024 token ids are allowed, got 1025",
    ),
    "logit_bias": (
        {"logit_bias": dict.fromkeys(range(300), 1.0)},
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)},
        "logit_bias: at most 1024 entries are allowed, got 1025",
    ),
    "logit_bias value": ({"logit_bias": {7: 100.0}}, {"logit_bias": {7: 100.5}}, "logit_bias[7]: must be in [-100"),
    "logprobs": ({"logprobs": MAX_LOGPROBS}, {"logprobs": MAX_LOGPROBS + 1}, "logprobs: must be in [0, 20], got 21"),
    "prompt_logprobs": (
        {"prompt_logprobs": MAX_LOGPROBS},
        {"prompt_logprobs": MAX_LOGPROBS + 1},
        "prompt_logprobs: must be in [0, 20], got 21",
    ),
}


async def test_a_value_at_its_limit_is_served_and_one_beyond_refused_by_name(tmp_path: Path) -> None:
    async with router_rig(tmp_path) as b:
        for served, (name, (within, beyond, words)) in enumerate(LIMITS.items()):
            error = await refused(b.call(max_tokens=1, **beyond))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert (error.details() or "").startswith(words)
            assert len(b.prefill[0].requests) == served
            assert (await b.answer(max_tokens=1, **within)).usage.prompt_tokens == 3


async def test_messages_and_metadata_beyond_their_limits_are_refused_with_sizes(tmp_path: Path) -> None:
    async with router_rig(tmp_path) as b:
        small = METADATA_BYTES // 2
        assert (await whole(b.client.Generate(request("hi", max_tokens=1), metadata=(("x", "y" * small),)))).events
        error = await refused(b.client.Generate(request("hi"), metadata=(("x", "y" * METADATA_MAX_BYTES),), timeout=60))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"vs. {METADATA_MAX_BYTES}" in (error.details() or "")
        largest = largest_message(MAX_MODEL_LEN, 300)
        error = await refused(b.client.Generate(request("x" * largest), timeout=60))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"vs. {largest}" in (error.details() or "")
        assert (await b.answer(max_tokens=1)).text() == "a"


async def test_without_max_tokens_the_output_may_fill_the_workers_memory(caplog: pytest.LogCaptureFixture) -> None:
    small, large = (FakeEngine(page_size=16, pages=pages, max_model_len=400) for pages in (3, 4))
    async with Fleet(bundled.path()) as fleet:
        prefill = await fleet.prefill(engine=FakeEngine(max_model_len=400))
        assert not [record for record in caplog.records if "KV memory" in record.message]
        workers = [await fleet.decode(engine=engine) for engine in (small, large)]
        assert [record.levelname for record in caplog.records if "KV memory" in record.message] == ["WARNING"] * 2
        assert "holds 48 tokens, less than max_model_len, which is 400" in caplog.text
        assert "--kv-memory" in caplog.text
        client = await fleet.router([prefill], workers)
        done = await client.complete([5, 7], temperature=0, timeout=60, ignore_eos=True)
        assert len(done.token_ids) == 4 * 16 - 2
        with pytest.raises(InvalidRequest, match=r"max_tokens: .* any decode worker can hold .*5 pages, there are 4"):
            await client.complete([5, 7], max_tokens=63, timeout=60)
        with pytest.raises(InvalidRequest, match="token_ids: 64 prompt tokens leave no room in the 64"):
            await client.complete([5] * 64, timeout=60)


async def test_a_prompt_that_fits_no_prefill_worker_is_the_requests_fault_and_finds_one_that_it_fits() -> None:
    async with Fleet(bundled.path()) as fleet:
        small = await fleet.prefill(engine=FakeEngine(page_size=16, pages=2, max_model_len=400))
        decode = await fleet.decode(engine=FakeEngine(max_model_len=400))
        client = await fleet.router([small], [decode])
        problem = r"prompt_token_ids: .* need 3 pages, .* KV memory has 2, which hold 32 tokens \(--kv-memory\), got 33"
        with pytest.raises(InvalidRequest, match=problem):
            await client.complete([5] * 33, max_tokens=4, timeout=60)
        large = await fleet.prefill(engine=FakeEngine(max_model_len=400))
        both = await fleet.router([small, large], [decode])
        for _ in range(4):
            done = await both.complete([5] * 33, max_tokens=4, temperature=0, timeout=60, ignore_eos=True)
            assert len(done.token_ids) == 4
