"""Requests through the router over real gRPC, between a client and stub workers."""

import asyncio
import gc
import json
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

import router.request_runner
from baton.pb import decode_pb2, inference_pb2, prefill_pb2
from baton.request import RemoteExport
from baton.rpc.convert import export_from_proto
from router.request_runner import Attempt
from tests.integration.router_rig import RouterRig, router_rig, until, whole
from tests.integration.router_stubs import (
    KV,
    LENGTH,
    MAX_MODEL_LEN,
    STOP,
    DownStream,
    StubDecode,
    StubPrefill,
    letter,
    never_ending,
    text,
)


async def test_a_request_gets_its_text_tokens_usage_and_finish_reason(b: RouterRig) -> None:
    b.prefill[0].cached_tokens = 2
    answer = await b.answer(max_tokens=6, temperature=0)
    assert answer.text() == text(0, 6) == "abcdef"
    assert answer.tokens() == [letter(i) for i in range(6)]
    assert answer.last().finish_reason == LENGTH
    usage = inference_pb2.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=6, cached={})
    assert answer.usage == usage
    t = answer.events[-1].timings
    assert t.queue + t.prefill + t.transfer + t.slot_wait + t.decode == pytest.approx(t.total, rel=1e-12)
    assert 0 < t.queue < t.first_token <= t.total
    assert t.slot_wait == 0.001, "2**-10, rounded to microseconds"
    assert {event.request_id for event in answer.events} == {b.prefill[0].requests[0].request_id}
    (start,) = b.decode[0].starts
    transfer_id = b.prefill[0].requests[0].transfer_id
    assert transfer_id
    shard = replace(KV.whole, kv_address="127.0.0.1:7001")
    source = export_from_proto("source", start.source)
    assert source == RemoteExport(transfer_id, "incarnation-prefill-0", (shard,))
    (reserve,) = b.decode[0].reserves
    assert (reserve.context_tokens, reserve.max_new_tokens, reserve.choices) == (3, 6, 1)
    sampling = b.prefill[0].requests[0].sampling
    assert sampling.max_tokens == 6
    assert sampling.HasField("seed")
    # Decode ended the request itself, so nothing is left to be cancelled.
    assert b.decode[0].cancels == []


@pytest.mark.parametrize("end", ["finished", "prefilling", "decoding"])
async def test_an_ended_request_needs_no_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Each of a million tokens would keep 16 MB until a collection, which is rare."""
    freed, prefilling = asyncio.Event(), asyncio.Event()
    watches: list[weakref.ref[Attempt]] = []

    class Watched(Attempt):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            watches.append(weakref.ref(self, lambda _: freed.set()))

    async def prefill(_: prefill_pb2.PrefillRequest) -> None:
        prefilling.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(router.request_runner, "Attempt", Watched)
    async with asyncio.timeout(60), router_rig(tmp_path) as b:
        if end == "prefilling":
            b.prefill[0].script = prefill
        if end == "decoding":
            b.decode[0].script = never_ending
        gc.disable()
        try:
            call = b.call(max_tokens=4, temperature=0)
            await (prefilling.wait() if end == "prefilling" else call.read())
            if end == "finished":
                await whole(call)
            call.cancel()
            await freed.wait()
        finally:
            gc.enable()
        assert len(watches) == 1


async def test_max_tokens_default_is_what_the_models_length_leaves(b: RouterRig) -> None:
    answer = await b.answer()
    assert answer.usage.completion_tokens == MAX_MODEL_LEN - 3


async def test_four_choices_from_one_prefill(b: RouterRig) -> None:
    answer = await b.answer(max_tokens=5, n=4)
    assert [answer.text(choice) for choice in range(4)] == [text(choice, 5) for choice in range(4)]
    assert answer.usage.completion_tokens == 20
    assert [list(r.choice_indexes) for r in b.prefill[0].requests] == [[0, 1, 2, 3]]
    assert b.decode[0].reserves[0].choices == 4


async def test_one_token_reserves_nothing(b: RouterRig) -> None:
    answer = await b.answer(max_tokens=1)
    assert answer.text() == "a"
    assert answer.last().finish_reason == LENGTH
    assert b.prefill[0].requests[0].transfer_id == ""
    assert b.decode[0].reserves == []


async def test_first_token_that_ends_the_request_frees_decode(b: RouterRig) -> None:
    b.decode[0].script = never_ending
    answer = await b.answer(max_tokens=5, stop=["a"])
    assert (answer.text(), answer.last().stop_string) == ("", "a")
    await b.decode[0].log.until(lambda: len(b.decode[0].cancels) == 1)
    assert not b.decode[0].cancels[0].HasField("choice_index")


async def test_stop_string_across_tokens_ends_one_choice_of_two(b: RouterRig) -> None:
    gate = asyncio.Event()

    async def gated(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
        for choice in (0, 1):
            down.send(start.key, choice, 1, [letter(choice + i) for i in range(1, 5)])
        await gate.wait()
        down.send(start.key, 1, 5, [letter(6)], LENGTH)

    b.decode[0].script = gated
    call = b.call(max_tokens=6, n=2, stop=["abcd"])
    await b.decode[0].log.until(lambda: len(b.decode[0].cancels) == 1)
    assert b.decode[0].cancels[0].choice_index == 0
    gate.set()
    answer = await whole(call)
    assert (answer.text(0), answer.text(1)) == ("", "bcdefg")
    assert (answer.last(0).stop_string, answer.last(0).finish_reason) == ("abcd", STOP)
    assert answer.last(1).finish_reason == LENGTH
    # Four tokens of choice 0 were read, and those after the stop string were not.
    assert answer.usage.completion_tokens == 4 + 6


async def test_chat_tokenize_detokenize_and_model(tmp_path: Path) -> None:
    turns = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    template = turns + "{{ 'A' if add_generation_prompt }}{{ more }}"
    async with router_rig(tmp_path, template=template) as b:
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="é")])
        ids = (await b.client.Tokenize(inference_pb2.TokenizeRequest(chat=chat))).token_ids
        detokenize = inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
        assert (await b.client.Detokenize(detokenize)).text == "<s>user:é;A"
        for more, text in ((3, "3"), (0.5, "0.5"), (False, "False"), ("x", "x"), (None, "None")):
            chat.chat_template_kwargs = json.dumps({"more": more})
            detokenize.token_ids[:] = (await b.client.Tokenize(inference_pb2.TokenizeRequest(chat=chat))).token_ids
            assert (await b.client.Detokenize(detokenize)).text == f"<s>user:é;A{text}"
        for wrong, words in (
            ('{"more": [1]}', "chat_template_kwargs.more: must be a number"),
            ("[1]", "chat_template_kwargs: must be a JSON object"),
            ("{", "chat_template_kwargs: is not JSON"),
            ("[" * 60_000, "chat_template_kwargs: is not JSON"),
            (" " * 65_537, "chat_template_kwargs: must have at most 65536 characters"),
        ):
            chat.chat_template_kwargs = wrong
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await b.client.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
        chat.chat_template_kwargs = ""
        await whole(b.client.Generate(inference_pb2.GenerateRequest(chat=chat, sampling={"max_tokens": 1})))
        assert list(b.prefill[0].requests[0].prompt_token_ids) == list(ids)
        plain = await b.client.Tokenize(inference_pb2.TokenizeRequest(text="ab", add_special_tokens=False))
        assert list(plain.token_ids) == [letter(0), letter(1)]
        model = await b.client.GetModel(inference_pb2.GetModelRequest())
        assert (model.name, model.max_model_len, model.vocab_size) == (tmp_path.name, MAX_MODEL_LEN, 300)
        assert (list(model.eos_token_ids), model.has_chat_template) == ([257], True)
        assert model.fingerprint == "f" * 64


async def test_workers_are_shown_by_their_degrees(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(stub: StubPrefill | StubDecode) -> None:
        if stub.identity.worker_id != "decode-0":
            stub.identify(tensor_parallel=2)

    caplog.set_level(logging.INFO)
    async with router_rig(tmp_path, decode=3, change=change) as b:
        await until(b.app, lambda: len(b.app.pool.fleet.decode) == 3)
        model = await b.client.GetModel(inference_pb2.GetModelRequest())
    groups = [(each.role, each.workers, each.tensor_parallel, each.pipeline_parallel) for each in model.workers]
    assert groups == [("prefill", 1, 2, 1), ("decode", 1, 1, 1), ("decode", 2, 2, 1)]
    joined = [each.getMessage().partition(" joined")[2] for each in caplog.records if " joined" in each.getMessage()]
    assert sorted(joined) == ["", *[": tensor_parallel 2, pipeline_parallel 1"] * 3]


async def test_a_report_that_is_cut_off_is_computed_again_without_a_seam(b: RouterRig) -> None:
    reports = [1, 2, 3]

    def report(asked: prefill_pb2.PrefillRequest) -> list[inference_pb2.TokenInfo]:
        return [inference_pb2.TokenInfo(token_id=each) for each in asked.prompt_token_ids[: reports.pop(0)]]

    b.prefill[0].report = report  # type: ignore[method-assign]
    answer = await b.answer(max_tokens=1, prompt_logprobs=0)
    prompt = [token.token_id for event in answer.events for token in event.prompt_tokens]
    assert prompt == list(b.prefill[0].requests[0].prompt_token_ids)
    assert answer.text() == text(0, 1)
    assert not reports


async def test_logprobs_of_prompt_and_output(b: RouterRig) -> None:
    done = b.prefill[0].done

    def with_logprobs(asked: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillDone:
        answer = done(asked)
        answer.first_tokens[0].token.logprob = -0.5
        answer.first_tokens[0].token.top.add(token_id=7, logprob=-0.25)
        return answer

    def report(asked: prefill_pb2.PrefillRequest) -> list[inference_pb2.TokenInfo]:
        first, *others = asked.prompt_token_ids
        return [inference_pb2.TokenInfo(token_id=first)] + [
            inference_pb2.TokenInfo(token_id=other, logprob=-1.5) for other in others
        ]

    b.prefill[0].done = with_logprobs  # type: ignore[method-assign]
    b.prefill[0].report = report  # type: ignore[method-assign]
    answer = await b.answer(max_tokens=1, logprobs=1, prompt_logprobs=0)
    prompt = [token for event in answer.events for token in event.prompt_tokens]
    assert [token.token_id for token in prompt] == list(b.prefill[0].requests[0].prompt_token_ids)
    assert [token.logprob for token in prompt] == [0.0, -1.5, -1.5]
    assert not prompt[0].HasField("logprob")
    # The whole report comes before the first token, although prefill said it later.
    last = max(at for at, event in enumerate(answer.events) if event.prompt_tokens)
    assert not any(event.choices for event in answer.events[:last])
    token = answer.deltas(0)[0].tokens[0]
    assert (token.logprob, token.top[0].token_id, token.top[0].logprob) == (-0.5, 7, -0.25)
