"""A router's listeners against bytes and messages that make no sense; see test_prefill_worker."""

from pathlib import Path

from baton.pb import inference_pb2
from tests.fuzz.storm import LEDGER, Method, calls, hang_ups, healthy
from tests.integration.router_rig import request, router_rig

INFERENCE = (
    Method("/baton.v1.Inference/Generate", True, request("hi", max_tokens=4, temperature=0)),
    Method("/baton.v1.Inference/Tokenize", False, inference_pb2.TokenizeRequest(text="hi")),
    Method("/baton.v1.Inference/Detokenize", False, inference_pb2.DetokenizeRequest(token_ids=[1, 2])),
    Method("/baton.v1.Inference/GetModel", False, inference_pb2.GetModelRequest()),
    LEDGER,
)


async def test_the_router_blames_the_caller(tmp_path: Path) -> None:
    async with router_rig(tmp_path, template="{{ messages }}") as b:
        await calls("Generate, Tokenize, Detokenize, GetModel, Ledger", 300, b.app.address, INFERENCE)
        await hang_ups("sockets of a router", 80, [b.app.address, b.app.ops_address])
        assert await healthy(b.app.address)
        assert (await b.answer(max_tokens=3)).usage.completion_tokens == 3
