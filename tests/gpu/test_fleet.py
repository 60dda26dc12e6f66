"""Workers on CUDA, as real gRPC services in one process: their tokens equal those of transformers' generate."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.request import SamplingParams
from baton.telemetry.metrics import TRANSFER_BYTES
from tests.checkpoints import lively_prompt, load_reference, prompt_ids
from tests.decoding import digests
from tests.metrics import count
from tests.mixed_rig import Answer, Fleet, Worker, fleet

DEVICE: dict[str, Any] = {"device": "cuda"}
CPU: dict[str, Any] = {"device": "cpu", "kernels": "torch"}
HOST: dict[str, Any] = {"kv_home": "host", "segment_tokens": 24}
TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
SEVERAL = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, n=3)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts of several lengths, with the tokens of transformers."""
    model = load_reference(checkpoint)
    found = [lively_prompt(model, length, 2 * TOKENS) for length in (3, 16, 33, 130, 300)]
    return [(prompt, reference.token_ids) for prompt, reference in found]


async def together(made: Fleet, pairs: list[tuple[Worker, Worker]], prompts: list[list[int]]) -> list[Answer]:
    """Answers of requests that run at the same time, each with a worker that prefills and one that decodes."""
    asked = [
        await made.workers.ask(source, target, prompt, GREEDY)
        for (source, target), prompt in zip(pairs, prompts, strict=True)
    ]
    return [await each.answer() for each in asked]


@pytest.mark.parametrize(
    "settings", [{}, {"page_size": 16, "chunk_size": 20}, HOST], ids=["pages of 256", "16", "host"]
)
async def test_prompts_in_place_and_prefix_hits(
    checkpoint: Path, expected: list[tuple[list[int], list[int]]], settings: dict[str, Any]
) -> None:
    """A prompt again finds its blocks, and so does a conversation that goes on; then all prompts run together."""
    async with fleet(checkpoint, **DEVICE, **settings) as made:
        received = count(TRANSFER_BYTES.labels("received"))
        worker = await made.mixed()
        engine = worker.app.engine
        for prompt, tokens in expected:
            hits = min(engine.match_prefix(digests(engine, prompt)), len(prompt) - 1)
            answer = await made.workers.complete(worker, worker, prompt, GREEDY)
            assert (answer.tokens, answer.pinned, answer.fetch_ms) == ([tokens[:TOKENS]], hits, 0)
            again = await made.workers.complete(worker, worker, prompt, GREEDY, start_first=False)
            assert again.tokens == [tokens[:TOKENS]]
            assert again.cached == min(len(prompt) // 16 * 16, len(prompt) - 1)
            later = await made.workers.complete(worker, worker, [*prompt, *tokens[:TOKENS]], GREEDY)
            assert later.tokens == [tokens[TOKENS:]]
            assert later.pinned >= len(prompt) // 16 * 16
        answers = await together(made, [(worker, worker)] * len(expected), [prompt for prompt, _ in expected])
        assert [each.tokens for each in answers] == [[tokens[:TOKENS]] for _, tokens in expected]
        assert count(TRANSFER_BYTES.labels("received")) == received


async def test_transfers_between_workers(checkpoint: Path, expected: list[tuple[list[int], list[int]]]) -> None:
    """All roles, pages of several sizes and homes."""
    async with fleet(checkpoint, **DEVICE) as made:
        mixed, other = await made.mixed(), await made.mixed(page_size=32)
        prefill, decode = await made.prefill(**HOST), await made.decode(page_size=16)
        pairs = [(mixed, decode), (prefill, mixed), (mixed, other), (prefill, decode), (other, other)]
        answers = await together(made, pairs, [prompt for prompt, _ in expected])
        assert [each.tokens for each in answers] == [[tokens[:TOKENS]] for _, tokens in expected]
        assert [each.fetch_ms > 0 for each in answers] == [source is not target for source, target in pairs]


@pytest.mark.parametrize(("source", "target"), [(DEVICE, CPU), (CPU, DEVICE)], ids=["cuda to cpu", "cpu to cuda"])
async def test_transfers_between_devices(
    checkpoint: Path,
    expected: list[tuple[list[int], list[int]]],
    source: dict[str, Any],
    target: dict[str, Any],
) -> None:
    async with fleet(checkpoint) as made:
        pair = await made.prefill(**source), await made.decode(**target)
        answers = await together(made, [pair] * len(expected), [prompt for prompt, _ in expected])
        assert [each.tokens for each in answers] == [[tokens[:TOKENS]] for _, tokens in expected]


async def test_choices_and_prompt_logprobs_are_those_of_a_cpu(checkpoint: Path) -> None:
    prompt = prompt_ids(50)
    report = replace(GREEDY, max_tokens=4, prompt_logprobs=2)
    async with fleet(checkpoint, **DEVICE) as made:
        mixed, prefill, decode = await made.mixed(chunk_size=16), await made.prefill(), await made.decode()
        cpu = await made.mixed(**CPU)
        for params in (SEVERAL, report, replace(GREEDY, max_tokens=1)):
            wanted, *found = await asyncio.gather(
                *(
                    made.workers.complete(*pair, prompt, params)
                    for pair in ((cpu, cpu), (mixed, mixed), (prefill, decode))
                )
            )
            for each in found:
                assert each.tokens == wanted.tokens
                assert [token.token_id for token in each.prompt_logprobs] == [
                    token.token_id for token in wanted.prompt_logprobs
                ]
