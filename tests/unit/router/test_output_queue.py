"""Output that gathers for a slow client: cut into messages of bounded size, in order, and complete."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import EngineError
from baton.pb import inference_pb2
from baton.request import FinishReason, PrefillProgress, Timings, TokenInfo, Usage
from router.output import MESSAGE_BYTES, OutputQueue
from router.serving.servicer import _response

USAGE = Usage(2**31, 2**31, 2**31)
TIMINGS = Timings(*[1e9] * 8)


def token(alternatives: int) -> TokenInfo:
    return TokenInfo(2**32 - 1, -1.5, ((2**32 - 1, -1.5),) * alternatives)


@dataclass
class Told:
    """Output that a client joins from all messages."""

    text: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, tuple[int, str]] = field(default_factory=dict)
    prompt: int = 0
    usages: list[bool] = field(default_factory=list)

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        assert response.ByteSize() <= MESSAGE_BYTES
        self.usages.append(response.HasField("usage"))
        if response.prompt_tokens:
            assert not self.tokens
        self.prompt += len(response.prompt_tokens)
        for delta in response.choices:
            assert delta.index not in self.ends
            self.text[delta.index] += delta.text
            self.tokens[delta.index] += [len(each.top) for each in delta.tokens]
            if delta.finish_reason:
                self.ends[delta.index] = delta.finish_reason, delta.stop_string


TAKE = st.just(None)
ADD = st.tuples(
    st.integers(0, 63),
    st.sampled_from([0, 0, 3, 21]),
    st.sampled_from([("", 0), ("a", 1), ("é", 900), ("\N{GRINNING FACE}", 20_000)]),
    st.booleans(),
)


@given(prompt=st.sampled_from([0, 1, 200, 3000]), steps=st.lists(TAKE | ADD, max_size=20), copies=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
async def test_messages_are_bounded_and_joined_are_all_that_was_said(
    prompt: int, steps: list[tuple[int, int, tuple[str, int], bool] | None], copies: int
) -> None:
    queue, told, expected, waits = OutputQueue(prompt), Told(), Told(), 0
    if prompt:
        queue.add_prompt_logprobs([token(21)] * prompt)
    for step in steps:
        if step is None:
            if waits:
                told.add(_response("r" * 24, await queue.take()))
                waits = 0
            continue
        choice, alternatives, (char, length), ends = step
        text = char * length
        if choice in expected.ends:
            continue
        for _ in range(copies):
            queue.add(choice, token(alternatives), text)
        expected.text[choice] += copies * text
        expected.tokens[choice] += copies * [alternatives]
        waits += 1
        if ends:
            queue.add(choice, token(0), "", FinishReason.STOP, stop_string="\N{GRINNING FACE}" * 1024)
            expected.tokens[choice].append(0)
            expected.ends[choice] = inference_pb2.FINISH_REASON_STOP, "\N{GRINNING FACE}" * 1024
    queue.close(USAGE, TIMINGS)
    queue.fail(EngineError("too late to matter"))
    while not any(told.usages):
        told.add(_response("r" * 24, await queue.take()))
    assert (told.text, told.tokens, told.ends, told.prompt) == (expected.text, expected.tokens, expected.ends, prompt)
    with pytest.raises(StopAsyncIteration):
        await queue.take()


async def test_output_that_fits_is_one_message() -> None:
    queue = OutputQueue(2)
    queue.add_prompt_logprobs([token(20)] * 2)
    for choice in (0, 1, 0, 1):
        queue.add(choice, token(20), "a")
    queue.close(USAGE, TIMINGS)
    news = await queue.take()
    assert (len(news.prompt_tokens), [delta.text for delta in news.deltas.values()]) == (2, ["aa", "aa"])
    assert news.usage == USAGE


async def test_output_waits_for_the_whole_report() -> None:
    queue = OutputQueue(3)
    queue.add(0, token(20), "a")
    queue.add_prompt_logprobs([token(20)])
    first = await queue.take()
    assert (len(first.prompt_tokens), first.deltas) == (1, {})
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.add_prompt_logprobs([token(20)] * 2)
    last = await taking
    assert (len(last.prompt_tokens), list(last.deltas)) == (2, [0])


async def test_only_the_newest_progress_is_sent_and_in_a_message_of_its_own() -> None:
    queue = OutputQueue(1)
    for done in range(1000):
        queue.report_progress(PrefillProgress(done, 1000))
    queue.add_prompt_logprobs([token(20)])
    queue.add(0, token(20), "a")
    news = await queue.take()
    assert (news.progress, news.prompt_tokens, news.deltas) == (PrefillProgress(999, 1000), (), {})
    news = await queue.take()
    assert (news.progress, len(news.prompt_tokens), list(news.deltas)) == (None, 1, [0])


async def test_progress_wakes_who_waits_for_it() -> None:
    queue = OutputQueue()
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.report_progress(PrefillProgress(1, 2))
    assert (await asyncio.wait_for(taking, 60)).progress == PrefillProgress(1, 2)
