"""Checks of a long prompt, and the threads on which its reports are converted."""

from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.pb import inference_pb2
from baton.request import SamplingParams
from baton.tokenizer import Tokenizer
from router.serving.large_messages import ReceivedMessage
from router.serving.servicer import generate_request
from router.serving.threads import TenantThreads
from router.serving.validator import RequestValidator, ServedModel
from tests.integration.router_stubs import checkpoint


async def test_a_report_that_no_message_can_carry_is_refused_before_it_is_computed() -> None:
    validator = RequestValidator(ServedModel("m", 300, (), None), lambda: 1_000_000, TenantThreads(1))

    async def take(count: int) -> Any:
        ids = inference_pb2.TokenIds(ids=[1] * count)
        sampling = inference_pb2.SamplingParams(prompt_logprobs=20)
        message = inference_pb2.GenerateRequest(token_ids=ids, sampling=sampling)
        return await validator.validate(generate_request(ReceivedMessage(message, 1)), arrived=0.0, deadline=60.0)

    assert len((await take(280_000)).prompt_ids) == 280_000
    with pytest.raises(InvalidRequest, match=r"^prompt_logprobs: those of 290000 prompt tokens .*, got 20$"):
        await take(290_000)


async def test_token_ids_that_wait_to_become_text_count_with_their_memory(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Noting(TenantThreads):
        async def run(self, tenant: str, function: Any, size: int = 0) -> Any:
            sizes.append(size)
            return await super().run(tenant, function, size)

    tokenizer = Tokenizer.load(checkpoint(tmp_path))
    validator = RequestValidator(ServedModel("m", 300, (), tokenizer), lambda: 1_000_000, Noting(1))
    await validator.detokenize([1] * 5_000)
    assert sizes == [20_000]


async def test_a_prompt_must_fit_a_prefill_worker_and_leave_room_in_a_decode_worker(tmp_path: Path) -> None:
    model = ServedModel("m", 300, (), Tokenizer.load(checkpoint(tmp_path)))
    prefill, decode = 4, 6
    validator = RequestValidator(
        model, lambda: 100, TenantThreads(1), prefill_capacity=lambda: prefill, decode_capacity=lambda: decode
    )

    async def max_tokens(**prompt: Any) -> int:
        message = inference_pb2.GenerateRequest(**prompt)
        return (
            await validator.validate(generate_request(ReceivedMessage(message, 1)), arrived=0.0, deadline=60.0)
        ).max_tokens

    ids = inference_pb2.TokenIds
    assert await max_tokens(token_ids=ids(ids=[1] * 4)) == 2
    with pytest.raises(InvalidRequest, match=r"^token_ids: 5 prompt tokens do not fit the 4 that a prefill worker's"):
        await max_tokens(token_ids=ids(ids=[1] * 5))
    with pytest.raises(
        InvalidRequest, match=r"^token_ids: 6 prompt tokens leave no room for output: .* holds 6 tokens$"
    ):
        await max_tokens(token_ids=ids(ids=[1] * 6))
    with pytest.raises(InvalidRequest, match=r"^text: .* prompt tokens do not fit the 4 that a prefill worker's"):
        await max_tokens(text="a b c d e", sampling=inference_pb2.SamplingParams(max_tokens=1))
    prefill = decode = 0
    assert await max_tokens(token_ids=ids(ids=[1] * 60)) == 40


async def test_the_models_defaults_hold_where_a_request_says_nothing() -> None:
    defaults = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 30}
    validator = RequestValidator(ServedModel("m", 300, (), None, None, defaults), lambda: 40, TenantThreads(1))

    async def params(count: int = 1, **sampling: Any) -> SamplingParams:
        message = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[1] * count), sampling=inference_pb2.SamplingParams(**sampling)
        )
        request = generate_request(ReceivedMessage(message, 1))
        return (await validator.validate(request, arrived=0.0, deadline=60.0)).params

    assert await params(seed=1) == SamplingParams(**defaults, seed=1)
    given = {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 5}
    with pytest.raises(InvalidRequest, match=r"^stop: the model has no tokenizer; send stop_token_ids, got \['x'\]$"):
        await params(stop=["x"])
    assert await params(seed=1, **given) == SamplingParams(max_tokens=5, seed=1)
    assert (await params(25)).max_tokens == 15, "the default is only the most"
    with pytest.raises(InvalidRequest, match=r"^max_tokens: 25 prompt tokens"):
        await params(25, max_tokens=30)
