"""The arithmetic of reports, against requests written by hand; percentiles."""

from array import array
from typing import Any

import pytest

from baton.bench.load.http_target import MAX_EVENT_BYTES, Events, EventTooLong
from baton.bench.load.outcome import Ending, Outcome
from baton.bench.load.report import Objectives, report
from baton.bench.load.runner import LoadPlan, LoadRun
from baton.bench.stats import percentile, summary


def outcome(
    sent: float, *times: float, counts: tuple[int, ...] = (), ending: Ending = Ending.FINISHED, **more: Any
) -> Outcome:
    counts = counts or (1,) * len(times)
    values = {"input_tokens": 10, "tokens": sum(counts), "ended": max((sent, *times)), **more}
    return Outcome(
        values.pop("due", sent), sent, ending=ending, times=array("d", times), counts=array("I", counts), **values
    )


def run(*outcomes: Outcome, began: float = 100.0, ended: float = 110.0) -> LoadRun:
    made = LoadRun(LoadPlan(requests=len(outcomes)), began=began, ended=ended, cpu_s=1.0, outcomes=list(outcomes))
    for each in outcomes:
        made.endings[each.ending] += 1
    return made


def told(*outcomes: Outcome, slo: Objectives | None = None, **more: Any) -> dict[str, Any]:
    return report(run(*outcomes, **more), "t", {"rate": 2.0}, slo or Objectives())


def test_percentiles_are_nearest_ranks() -> None:
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.0, 0.01, 0.07, 0.5, 0.9, 0.99, 1.0)] == [1, 1, 7, 50, 90, 99, 100]
    assert percentile([3, 1, 2], 0.5) == 2
    assert summary([0.004, 0.001, 0.002, 0.003]) == {"p50": 2.0, "p90": 4.0, "p99": 4.0, "mean": 2.5, "max": 4.0}
    assert summary([]) == dict.fromkeys(("p50", "p90", "p99", "mean", "max"))


def test_every_number_of_a_report() -> None:
    found = told(
        outcome(101.0, 101.5, 101.6, 101.8, due=100.75),
        # Speculative decoding: three events, seven tokens.
        outcome(102.0, 104.0, 104.1, 104.5, counts=(1, 2, 4)),
        outcome(103.0, 103.5, ending=Ending.FAILED, kind="timeout", message="late", tokens=1),
        outcome(104.0, ending=Ending.REFUSED, kind="http 429", message="full"),
        outcome(105.0, ending=Ending.REFUSED, kind="http 429", message="still full"),
    )
    assert found["requests"] == {"sent": 5, "finished": 2, "failed": 1, "refused": 2, "interrupted": 0}
    assert found["seconds"] == 10.0
    assert found["output_tokens"] == 11
    assert found["output_tokens_per_s"] == 1.1
    # Refused prompts were not read.
    assert found["input_tokens_per_s"] == 3.0
    assert found["requests_per_s"] == 0.2
    assert found["ttft_ms"] == {"p50": 500.0, "p90": 2000.0, "p99": 2000.0, "mean": 1000.0, "max": 2000.0}
    assert found["itl_ms"] == {"p50": 100.0, "p90": 400.0, "p99": 400.0, "mean": 200.0, "max": 400.0}
    assert found["tpot_ms"]["p50"] == pytest.approx(83.333)
    assert found["tpot_ms"]["max"] == 150.0
    assert found["e2e_ms"] == {"p50": 800.0, "p90": 2500.0, "p99": 2500.0, "mean": 1650.0, "max": 2500.0}
    assert found["lateness_ms"]["max"] == 250.0
    assert found["generator_cpu"] == 0.1
    assert found["failures"] == {
        "http 429": {"count": 2, "example": "full"},
        "timeout": {"count": 1, "example": "late"},
    }


def test_goodput_counts_what_finished_within_both_objectives() -> None:
    good = outcome(100.0, 100.5, 100.51, 100.52)
    slow_start = outcome(100.0, 102.5, 102.51)
    slow_rhythm = outcome(100.0, 100.5, 100.6, 100.7)
    one_long_gap = outcome(100.0, 100.5, 100.51, 100.52, 100.53, 100.6)
    one_token = outcome(100.0, 100.5)
    failed = outcome(100.0, 100.5, 100.51, ending=Ending.FAILED, kind="timeout")
    assert told(good)["goodput_per_s"] == 0.1
    assert told(slow_start)["goodput_per_s"] == 0.0
    assert told(slow_start, slo=Objectives(ttft_ms=3000.0))["goodput_per_s"] == 0.1
    assert told(slow_rhythm)["goodput_per_s"] == 0.0
    assert told(slow_rhythm, slo=Objectives(itl_ms=101.0))["goodput_per_s"] == 0.1
    # The mean counts, so that one hiccup in a good rhythm is forgiven.
    assert told(one_long_gap)["goodput_per_s"] == 0.1
    assert told(one_token)["goodput_per_s"] == 0.1
    assert told(failed)["goodput_per_s"] == 0.0
    assert told(good, slow_start, slow_rhythm, one_token)["goodput_per_s"] == 0.2


@pytest.mark.parametrize(
    ("tokens", "cached"), [((5, 3), (8, 0.4)), ((0, 0), (0, 0.0)), ((None, None), (None, None)), ((5, None), (5, 0.25))]
)
def test_cached_tokens_of_the_finished(tokens: tuple[int | None, ...], cached: tuple[int | None, float | None]) -> None:
    """vLLM tells of hits only, so what it does not tell once it has told of one is none."""
    finished = [outcome(100.0, 100.5, cached_tokens=each) for each in tokens]
    failed = outcome(100.0, 100.5, ending=Ending.FAILED, kind="timeout")
    found = told(*finished, failed)
    assert (found["cached_tokens"], found["cached_share"]) == cached


def test_prompt_tokens_of_texts_are_what_the_server_counts() -> None:
    found = told(outcome(100.0, 100.5, input_tokens=None), outcome(100.0, 100.5, input_tokens=7))
    assert (found["input_tokens"], found["input_tokens_per_s"]) == (7, 0.7)
    found = told(outcome(100.0, 100.5, input_tokens=None))
    assert (found["input_tokens"], found["input_tokens_per_s"]) == (None, None)


def test_the_wait_for_the_cap_is_no_lateness() -> None:
    waited = outcome(103.0, 103.5, due=100.0, capped=2.75)
    made = run(waited, outcome(100.0, 100.5))
    assert report(made, "t", {"rate": 2.0}, Objectives())["cap_wait_ms"]["max"] is None
    made.plan = LoadPlan(max_concurrency=1)
    found = report(made, "t", {"rate": 2.0, "max_concurrency": 1}, Objectives())
    assert (found["cap_wait_ms"]["p50"], found["cap_wait_ms"]["max"]) == (0.0, 2750.0)
    assert found["lateness_ms"]["max"] == 250.0
    assert found["ttft_ms"]["max"] == 500.0


def test_a_run_without_any_answer_still_reports() -> None:
    found = told(outcome(100.0, ending=Ending.FAILED, kind="connection", message="refused"))
    assert found["requests"]["failed"] == 1
    assert found["ttft_ms"]["p99"] is None
    assert told()["requests"]["sent"] == 0


def test_events_however_the_stream_is_cut() -> None:
    stream = (
        b": ping\r\n\r\ndata: {1}\n\ndata:{2}\n\nevent: x\ndata: {3}\ndata: {4}\n\nid: 7\n\ndata: [DONE]\n\ndata: cut"
    )
    whole = [b"{1}", b"{2}", b"{3}\n{4}", b"[DONE]"]
    assert Events().feed(stream) == whole
    for step in (1, 3, 7):
        events, found = Events(), []
        for at in range(0, len(stream), step):
            found += events.feed(stream[at : at + step])
        assert found == whole
    events = Events()
    assert events.feed(b"x" * MAX_EVENT_BYTES) == []
    with pytest.raises(EventTooLong):
        events.feed(b"x")
