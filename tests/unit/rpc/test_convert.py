"""Dataclasses survive the way over the wire."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.kv.format import KvFormat, KvPart
from baton.pb import inference_pb2, kv_pb2
from baton.request import (
    PARAMETERS,
    CachedTokens,
    CachePolicy,
    FinishReason,
    FirstToken,
    Handoff,
    PrefillProgress,
    SamplingParams,
    Timings,
    TokenInfo,
    Usage,
)
from baton.rpc import convert

_OTHER: dict[str, Any] = {
    "int": 3,
    "float": 0.5,
    "tuple[str, ...]": ("\n\n", "é"),
    "tuple[int, ...]": (1, 2),
    "tuple[tuple[int, float], ...]": ((3, -100.0), (9, 1.5)),
}
RICH = SamplingParams(**{name: _OTHER.get(each.kind, not each.default) for name, each in PARAMETERS.items()})
"""Every field differs from its default."""
TOKEN = TokenInfo(5, -0.5, ((5, -0.5), (6, -1.25)))


@pytest.mark.parametrize(
    "params", [SamplingParams(), RICH, SamplingParams(temperature=0.0, seed=2**64 - 1, logprobs=0)]
)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    wire = convert.sampling_to_proto(params).SerializeToString()
    assert convert.sampling_from_proto(inference_pb2.SamplingParams.FromString(wire)) == params


def test_an_empty_message_means_the_defaults() -> None:
    assert convert.sampling_from_proto(inference_pb2.SamplingParams()) == SamplingParams()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (inference_pb2.SamplingParams(temperature=float("nan")), "temperature"),
        (inference_pb2.SamplingParams(temperature=-1), "temperature"),
        (inference_pb2.SamplingParams(top_p=0), "top_p"),
        (inference_pb2.SamplingParams(top_p=2), "top_p"),
        (inference_pb2.SamplingParams(max_tokens=0), "max_tokens"),
        (inference_pb2.SamplingParams(n=0), "n"),
        (inference_pb2.SamplingParams(stop=["x"] * 10_000), "stop"),
    ],
)
def test_bad_values_are_refused_by_name(message: inference_pb2.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert.sampling_from_proto(message)
    assert caught.value.field == field


KV_FORMAT = KvFormat((KvPart("k", "bfloat16", (2, 64)), KvPart("v", "float32", (2, 64))), layers=3, block_size=16)
KINDS: dict[str, list[Any]] = {
    "token": [TokenInfo(3), TokenInfo(0, -1.5), TOKEN],
    "kv_format": [KV_FORMAT],
    "finish": [None, FinishReason.STOP, FinishReason.LENGTH],
    "cache_policy": [*CachePolicy],
    "progress": [PrefillProgress(0, 9), PrefillProgress(5, 9, 2.5, 0.0)],
    "usage": [Usage(1, 2, 3, CachedTokens(1, 2, 3, 4, 5))],
    "timings": [Timings(1, 2, 3, 4, 5, 15, 6, 7)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_values_of_a_kind_come_back(kind: str) -> None:
    there, back = getattr(convert, f"{kind}_to_proto"), getattr(convert, f"{kind}_from_proto")
    assert [back(there(value)) for value in KINDS[kind]] == KINDS[kind]


def test_a_handoff_survives_the_wire_and_is_checked() -> None:
    first = (FirstToken(0, TOKEN), FirstToken(2, TokenInfo(1), FinishReason.STOP))
    handoff = Handoff("r", 3, array("I", (1, 2, 3)), array("I", (4,)), RICH, first)
    wire = b"".join(convert.handoff_to_wire(handoff))
    assert convert.handoff_from_wire(wire, 5) == handoff
    message = kv_pb2.Handoff.FromString(wire)
    assert (message.prompt_token_ids, message.output_token_ids) == ([1, 2, 3], [4])
    assert convert.handoff_from_wire(message.SerializeToString(), 5) == handoff
    for vocab_size, field in ((4, "output_token_ids"), (3, "prompt_token_ids")):
        with pytest.raises(InvalidRequest, match=field):
            convert.handoff_from_wire(wire, vocab_size)


def test_a_long_handoff_is_written_and_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call that keeps the interpreter's lock takes all of a million ids."""
    checked: list[int] = []

    def check(name: str, ids: Sequence[int], vocab_size: int, first: int) -> None:
        assert first == sum(checked)
        checked.append(len(ids))

    monkeypatch.setattr(convert, "check_token_ids", check)
    handoff = Handoff("r", 1, array("I", range(100_000)), array("I"), SamplingParams(), ())
    parts = list(convert.handoff_to_wire(handoff))
    assert max(map(len, parts)) <= 1 << 16
    assert convert.handoff_from_wire(b"".join(parts), 1 << 17) == handoff
    assert sum(checked) == 100_000
    assert max(checked) <= 4096


def test_no_cache_policy_is_the_default_and_an_unknown_one_is_refused() -> None:
    assert convert.cache_policy_from_proto(inference_pb2.GenerateRequest().cache) is CachePolicy.READ_WRITE
    with pytest.raises(InvalidRequest, match=r"^cache: must be one of read_write, read, write, off, got 9$"):
        convert.cache_policy_from_proto(9)


@pytest.mark.parametrize(
    ("rate", "left"),
    [(2.5, math.nan), (2.5, math.inf), (2.5, -1.0), (2.5, 1e300), (math.nan, 3.0), (math.inf, 0.0), (-1.0, 3.0)],
)
def test_no_client_sees_a_rate_or_time_left_that_is_no_number(rate: float, left: float) -> None:
    sent = convert.progress_to_proto(PrefillProgress(5, 9, rate, left))
    assert convert.progress_from_proto(sent) == PrefillProgress(5, 9)
