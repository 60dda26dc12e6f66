"""Order, duplicates, texts, stop strings and the latency account, without a network."""

import itertools
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import EngineError
from baton.request import (
    DecodeTimings,
    FinishReason,
    FirstToken,
    Output,
    Prefilled,
    PrefillProgress,
    SamplingParams,
    TokenInfo,
    Usage,
)
from router.output import ChoiceUpdate, LatencyAccount, OutputProcessor, Update
from router.request import Request


class Letters:
    """A detokenizer for ids that are code points."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def output(**sampling: object) -> OutputProcessor:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    request = Request("r", (1, 2), params, 99, arrived=0.0, deadline=1e9, make_detokenizer=Letters)
    ticks = itertools.count(1)
    return OutputProcessor(request, lambda: float(next(ticks)))


def infos(text: str) -> tuple[TokenInfo, ...]:
    return tuple(TokenInfo(ord(char)) for char in text)


def first(choice: int, char: str, finish: FinishReason | None = None) -> Prefilled:
    return Prefilled((FirstToken(choice, TokenInfo(ord(char)), finish),), cached_tokens=1)


async def taken(e: OutputProcessor) -> Update:
    return await e.queue.take()


async def only(e: OutputProcessor) -> ChoiceUpdate:
    (delta,) = (await taken(e)).deltas.values()
    return delta


@given(
    text=st.text("abcdef", min_size=1, max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 4)), max_size=12),
    seed=st.randoms(use_true_random=False),
)
async def test_tokens_come_out_once_and_in_order(text: str, cuts: list[tuple[int, int]], seed: object) -> None:
    e = output()
    pieces = [(at, text[at : at + length]) for at, length in cuts if at < len(text)]
    pieces += [(at, text[at]) for at in range(len(text))]
    seed.shuffle(pieces)  # type: ignore[attr-defined]
    seen = ""
    for at, piece in pieces:
        end = at + len(piece) == len(text)
        before = e.count_emitted([0])
        e.add(Output(0, at, infos(piece), FinishReason.LENGTH if end else None))
        if e.count_emitted([0]) > before:
            delta = await only(e)
            seen += delta.text
            assert [token.token_id for token in delta.tokens] == [ord(char) for char in delta.text]
        assert text.startswith(seen)
    assert seen == text
    assert e.unfinished([0]) == ()


async def test_a_later_token_waits_for_the_first() -> None:
    e = output()
    e.add(Output(0, 1, infos("bc")))
    assert e.output_ids(0) == []
    e.add_first_tokens(first(0, "a"))
    assert (await only(e)).text == "abc"


async def test_nothing_is_emitted_beyond_a_stop_string() -> None:
    e = output(stop=("bc",))
    e.add(Output(0, 0, infos("abcd"), FinishReason.LENGTH))
    delta = await only(e)
    assert (delta.text, delta.finish, delta.stop_string) == ("a", FinishReason.STOP, "bc")
    assert len(delta.tokens) == 3


async def test_held_text_is_emitted_at_the_end() -> None:
    e = output(stop=("bX",))
    e.add(Output(0, 0, infos("ab")))
    assert (await only(e)).text == "a"
    e.add(Output(0, 2, infos("b"), FinishReason.LENGTH))
    delta = await only(e)
    assert (delta.text, delta.finish, delta.stop_string) == ("bb", FinishReason.LENGTH, None)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "ab"), (3, "ab"), (7, "ab"), (8, "ab\n\nUser: x")])
async def test_a_stop_string_counts_where_it_ends(min_tokens: int, text: str) -> None:
    """It begins with token 3 and ends with token 8, in another attempt, beside a choice of other text."""
    e = output(stop=("\n\nUser",), min_tokens=min_tokens, n=2)
    e.add(Output(0, 0, infos("ab\n\nU")))
    e.add(Output(1, 0, infos("\n\n"), FinishReason.LENGTH))
    e.drop_out_of_order([0])
    e.add(Output(0, 5, infos("ser: x"), FinishReason.LENGTH))
    deltas = (await taken(e)).deltas
    assert [delta.text for delta in deltas.values()] == [text, "\n\n"]
    assert deltas[0].stop_string == ("\n\nUser" if text == "ab" else None)


async def test_a_stop_token_is_emitted_but_not_its_text() -> None:
    e = output()
    e.add(Output(0, 0, infos("ab"), FinishReason.STOP))
    delta = await only(e)
    assert (delta.text, len(delta.tokens), delta.stop_token_id) == ("a", 2, ord("b"))


async def test_a_choice_that_nobody_asked_for_is_ignored() -> None:
    e = output(n=2)
    e.add(Output(2, 0, infos("a")))
    e.add(Output(1, 0, infos("a")))
    assert list((await taken(e)).deltas) == [1]


async def test_usage_counts_all_choices_and_the_first_attempts_cache() -> None:
    e = output(n=2)
    both = tuple(FirstToken(choice, TokenInfo(97), FinishReason.LENGTH) for choice in (0, 1))
    e.add_first_tokens(Prefilled(both, cached_tokens=1))
    e.add_first_tokens(Prefilled((), cached_tokens=2))
    e.close()
    news = await taken(e)
    assert news.usage == Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=2)
    assert news.timings is not None


async def test_an_error_follows_the_output_before_it() -> None:
    e = output()
    e.add(Output(0, 0, infos("a")))
    e.queue.fail(EngineError("dead"))
    assert (await only(e)).text == "a"
    with pytest.raises(EngineError, match="dead"):
        await taken(e)


SECONDS = st.floats(0, 100)


@given(SECONDS, SECONDS, SECONDS, st.floats(0, 1e6), st.floats(0, 1e6), st.booleans())
def test_timings_add_up(line: float, prefill: float, rest: float, fetch: float, wait: float, decoded: bool) -> None:
    account = LatencyAccount(5.0)
    account.on_placed(5.0 + line)
    account.on_tokens(0, 1, 5.0 + line + prefill)
    if decoded:
        account.on_decode(DecodeTimings(fetch, wait))
    t = account.timings(5.0 + line + prefill + rest)
    assert t.queue + t.prefill + t.transfer + t.slot_wait + t.decode == pytest.approx(t.total, rel=1e-12)
    assert t.total == pytest.approx(1e3 * (line + prefill + rest), abs=0.003)
    assert t.first_token == pytest.approx(1e3 * (line + prefill), abs=0.001)
    assert {round(getattr(t, each.name), 3) for each in fields(t)} == {getattr(t, each.name) for each in fields(t)}
    assert min(t.queue, t.prefill, t.transfer, t.slot_wait, t.decode) >= -1e-9


def test_the_parts_of_an_ordinary_request() -> None:
    account = LatencyAccount(0.0)
    account.on_placed(0.010)
    account.on_placed(0.500)
    account.on_tokens(0, 1, 0.110)
    account.on_decode(DecodeTimings(fetch_ms=130.0, slot_wait_ms=20.0))
    account.on_decode(DecodeTimings(fetch_ms=999.0, slot_wait_ms=999.0))
    for i in range(1, 5):
        assert account.on_tokens(0, 1, 0.110 + 0.1 * i) == pytest.approx(0.1)
    t = account.timings(0.560)
    parts = (t.queue, t.prefill, t.transfer, t.slot_wait, t.decode, t.total, t.first_token, t.mean_itl)
    assert parts == pytest.approx((10, 100, 30, 20, 400, 560, 110, 100))


async def test_progress_of_a_replay_does_not_come_between_tokens() -> None:
    e = output(max_tokens=9)
    e.report_progress(PrefillProgress(1, 2))
    e.add_first_tokens(first(0, "a"))
    e.report_progress(PrefillProgress(0, 3))
    assert (await taken(e)).progress == PrefillProgress(1, 2)
    assert (await only(e)).text == "a"
    e.close()
    assert (await taken(e)).progress is None


def test_a_report_is_complete_even_if_a_worker_sends_too_much() -> None:
    e = output(prompt_logprobs=0)
    e.add_prompt_logprobs(0, infos("a"))
    assert not e.prompt_logprobs_complete
    e.add_prompt_logprobs(0, infos("abc"))
    assert e.prompt_logprobs_complete
