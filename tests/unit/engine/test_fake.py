"""The fake engine's tokens, by hand, and that no fault in KV goes unseen."""

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.engine import core
from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine, decode, encode, expected_tokens
from baton.errors import EngineError
from baton.kv.format import PartData
from baton.request import SamplingParams, SequenceState, TokenInfo
from tests.contract.engines import chunks, generate, ignore, move, prefill, start, state, step
from tests.engine_calls import found, insert, prefill_chunk


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_tokens_by_hand() -> None:
    """The docstring's example: 5 + 14 + 1, then 5 + 14 + 60 + 2, then 5 + 14 + 60 + 324 + 2."""
    assert generate(FakeEngine(), state([5, 7]), 3) == [20, 81, 405]
    assert expected_tokens([5, 7], 3) == [20, 81, 405]
    seeded = SamplingParams(seed=30)
    assert expected_tokens([5, 7], 2, params=seeded, choice_index=4) == [54, 5 + 14 + 3 * 54 + 2 + 34]
    assert generate(FakeEngine(), state([5, 7], seeded, choice=4), 2) == [54, 217]


def test_long_outputs_equal_the_formula_modulo_the_vocabulary() -> None:
    prompt = [(7 * i) % 300 for i in range(100)]
    assert generate(FakeEngine(vocab_size=300), state(prompt), 60) == expected_tokens(prompt, 60, vocab_size=300)


def test_log_probabilities_tell_prefill_from_decode(engine: FakeEngine) -> None:
    handle = engine.reserve("a/1", 20)
    params = SamplingParams(temperature=0.0, logprobs=2)
    result = prefill_chunk(
        engine, handle, [5, 7], 0, 2, on_layer=ignore, sample=[state([5, 7], params)], prompt_logprobs=0
    )
    assert result.tokens == (TokenInfo(20, -1.0, ((20, -1.0), (21, -2.0))),)
    assert result.prompt_logprobs == (TokenInfo(7, -3.0),)
    insert(engine, handle, state([5, 7], params, [20]))
    assert found(engine.launch().result()) == [(handle, (TokenInfo(81, -2.0, ((81, -2.0), (82, -3.0))),))]


def test_time_is_spent_through_the_delay() -> None:
    spent: list[float] = []
    engine = FakeEngine(step_time=0.5, chunk_time=3.0, layers=3, delay=spent.append)
    handle, _ = start(engine, "a/1", state([1, 2, 3]))
    assert spent == [1.0, 1.0, 1.0]
    step(engine)
    assert spent == [1.0, 1.0, 1.0, 0.5]
    engine.free(handle)


def test_a_plan_that_can_not_be_made_is_made_whole_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    running = [start(engine, owner, state([5, 7])) for owner in ("a/1", "b/1")]
    with monkeypatch.context() as patch:
        made = iter([core.Join(0, array("q"), state([5, 7]))])
        patch.setattr(core, "Join", lambda *_: next(made))  # the second one fails
        with pytest.raises(StopIteration):
            engine.launch()
    found = step(engine)
    assert [[*outputs, found[handle]] for handle, outputs in running] == [[20, 81], [20, 81]]


Fault = Callable[[PartData], PartData]


def _flipped(at: int) -> Fault:
    def flip(part: PartData) -> PartData:
        data = bytearray(part.data)
        data[at % len(data)] ^= 1
        return replace(part, data=bytes(data))

    return flip


def _decode_after(
    engine: FakeEngine, prompt: list[int], tamper: Callable[[FakeEngine, KvHandle, KvHandle], object]
) -> list[int]:
    """Two decode tokens on a second engine after a transfer that `tamper` spoils."""
    target = FakeEngine(page_size=5)
    origin = engine.reserve("a/1", len(prompt))
    first = prefill(engine, origin, state(prompt)).token_id
    home = target.reserve("a/1", len(prompt) + 8)
    move(engine, origin, target, home, len(prompt))
    tamper(target, origin, home)
    insert(target, home, state(prompt, outputs=[first]))
    return [step(target)[home], step(target)[home]]


def test_every_lost_frame_changes_every_token(engine: FakeEngine) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    right = expected_tokens(prompt, 3)[1:]
    assert _decode_after(engine, prompt, lambda *_: None) == right
    kv_format = engine.spec.kv_format
    for layer in range(kv_format.layers):
        for head in range(kv_format.heads):
            for token, _ in chunks(len(prompt), 1):
                for part in range(2):

                    def spoil(target: FakeEngine, _origin: KvHandle, home: KvHandle) -> None:
                        frame = target.read_kv(home, layer, range(token, token + 1), range(head, head + 1))  # noqa: B023
                        frame[part] = _flipped(token)(frame[part])  # noqa: B023
                        target.write_kv(home, layer, token, head, frame)  # noqa: B023

                    wrong = _decode_after(engine, prompt, spoil)
                    assert wrong[0] != right[0]


@pytest.mark.parametrize("misplaced", [{"token": 1}, {"token": 2}, {"layer": 1}, {"head": 1}, {"parts": 1}])
def test_misplaced_frames_change_the_token(engine: FakeEngine, misplaced: dict[str, int]) -> None:
    prompt = [8] * 12
    right = expected_tokens(prompt, 2)[1:]

    def spoil(target: FakeEngine, origin: KvHandle, home: KvHandle) -> None:
        frame = engine.read_kv(origin, 0, range(4, 8), range(1))
        if "parts" in misplaced:
            frame = [replace(frame[0], data=frame[1].data), replace(frame[1], data=frame[0].data)]
        target.write_kv(home, misplaced.get("layer", 0), 4 + misplaced.get("token", 0), misplaced.get("head", 0), frame)

    assert _decode_after(engine, prompt, spoil)[0] != right[0]


def test_a_late_write_into_a_running_sequence_is_seen(engine: FakeEngine) -> None:
    prompt = list(range(20))
    handle, outputs = start(engine, "a/1", state(prompt))
    outputs.append(step(engine)[handle])
    assert outputs == expected_tokens(prompt, 2)
    frame = [_flipped(0)(part) for part in engine.read_kv(handle, 1, range(3, 4), range(1))]
    engine.write_kv(handle, 1, 3, 0, frame)
    assert step(engine)[handle] != expected_tokens(prompt, 3)[-1]


def test_prefill_sees_a_spoiled_prefix(engine: FakeEngine) -> None:
    prompt = list(range(40))
    handle = engine.reserve("a/1", 40)
    prefill_chunk(engine, handle, prompt, 0, 32, on_layer=ignore)
    frame = engine.read_kv(handle, 0, range(1), range(1))
    engine.write_kv(handle, 0, 5, 0, frame)
    result = prefill_chunk(engine, handle, prompt, 32, 40, on_layer=ignore, sample=[state(prompt)])
    assert result.tokens[0].token_id != expected_tokens(prompt, 1)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_holds_every_number(dtype: str) -> None:
    numbers = [float(number) for number in range(251)]
    assert list(decode(encode(numbers, dtype), dtype)) == numbers


def test_a_vocabulary_must_fit_the_digits() -> None:
    with pytest.raises(EngineError, match="63002"):
        FakeEngine(vocab_size=251**2 + 1)


def test_an_unseeded_sequence_state_counts_as_seed_zero(engine: FakeEngine) -> None:
    wanted = SequenceState(SamplingParams(), [1, 2], [], 3)
    assert generate(engine, wanted, 1) == [1 + 4 + 1 + 3]
