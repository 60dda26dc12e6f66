"""Refusals of the router: full fleets, workers that do not match, bad input, and values beyond a limit."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import bundled
from baton.engine.fake import FakeEngine
from baton.errors import InvalidRequest
from baton.kv.format import KvFormat
from baton.pb import decode_pb2, inference_pb2, prefill_pb2
from baton.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from baton.rpc.channel import METADATA_BYTES, METADATA_MAX_BYTES
from baton.telemetry.metrics import REPLAYS
from baton.transfer.tickets import TicketSigner
from baton.worker.status import WIRE_VERSION, WorkerRole
from router.serving.validator import largest_request
from tests.certificates import fleet
from tests.fleet import Fleet
from tests.integration.router_rig import RouterRig, refused, request, router_rig, until, whole
from tests.integration.router_stubs import KV, LENGTH, MAX_MODEL_LEN, DownStream, StubDecode, StubPrefill, letter
from tests.metrics import count


async def test_full_line_refuses_at_once_with_a_delay(tmp_path: Path) -> None:
    async with router_rig(tmp_path, queue_capacity=2, prefill_limit=1) as b:

        async def block(_: prefill_pb2.PrefillRequest) -> None:
            await asyncio.get_running_loop().create_future()

        b.prefill[0].script = block
        running = b.call(max_tokens=4)
        await b.prefill[0].log.until(lambda: len(b.prefill[0].requests) == 1)
        waiting = [b.call(max_tokens=4) for _ in range(3)]
        refusals = [asyncio.create_task(refused(call)) for call in waiting]
        done, rest = await asyncio.wait(refusals, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        (error,) = [task.result() for task in done]
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 requests are waiting, the limit is 2" in (error.details() or "")
        assert float(dict(error.trailing_metadata() or ())["retry-after"]) > 0
        assert len(rest) == 2
        for call in (running, *waiting):
            call.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


MISMATCHES = {
    "fingerprint": ("fingerprint", "0" * 64),
    "KV format": ("kv_format", KvFormat(KV.parts, layers=2, block_size=32)),
    "wire version": ("wire_version", WIRE_VERSION - 1),
    "tokenizer digest": ("tokenizer_digest", "1" * 64),
    "model": ("model", "another"),
    "role": ("role", WorkerRole.PREFILL),
}


@pytest.mark.parametrize("what", MISMATCHES)
async def test_mismatched_worker_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    name, value = MISMATCHES[what]
    odd: list[StubDecode] = []

    def change(stub: StubPrefill | StubDecode) -> None:
        if isinstance(stub, StubDecode):
            odd.append(stub)
            stub.identify(**{name: value})

    with caplog.at_level(logging.WARNING):
        async with router_rig(tmp_path, change=change, ready=False, worker_wait_s=0) as b:
            await until(
                b.app, lambda: bool(len(b.app.pool.fleet.prefill) or b.app.pool.describe_missing().count("refused"))
            )
            await until(b.app, lambda: "refused" in b.app.pool.describe_missing())
            for _ in range(3):
                odd[0].status.notify()
            error = await refused(b.call(max_tokens=2))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert f"its {what} is" in (error.details() or "")
    records = [record for record in caplog.records if "is refused" in record.getMessage()]
    # A rollout of other weights is no error.
    assert {record.levelname for record in records} == {"WARNING" if what == "fingerprint" else "ERROR"}
    said = [record.getMessage() for record in records]
    if what in ("fingerprint", "KV format"):
        # Whoever came first is the measure; the other one is named, once.
        assert len(said) == 1
    assert all("decode-0" in line or "prefill-0" in line for line in said)
    assert odd[0].reserves == []


async def test_new_requests_move_to_another_checkpoint_and_no_stream_has_output_of_both(tmp_path: Path) -> None:
    """Workers with another checkpoint are there before the old ones drain."""

    def change(stub: StubPrefill | StubDecode) -> None:
        stub.identify(fingerprint=stub.identity.worker_id[-1] * 64)

    async def one_token(down: DownStream, start: decode_pb2.Start, request: prefill_pb2.PrefillRequest) -> None:
        down.send(start.key, 0, 1, [letter(1)])

    async with router_rig(tmp_path, prefill=2, decode=2, change=change, ready=False) as b:
        views = b.app.pool.fleet

        def serves(number: int) -> bool:
            found = views.prefill.get(b.prefill[number].address), views.decode.get(b.decode[number].address)
            return all(view is not None and not view.draining for view in found)

        await until(b.app, lambda: serves(0) or serves(1))
        old, new = (0, 1) if serves(0) else (1, 0)
        b.decode[old].script = one_token
        streams = []
        # One after the other, so that their attempts start in this order.
        for _ in range(2):
            streams.append(b.call(max_tokens=4))
            text = ""
            while len(text) < 2:
                text += (await streams[-1].read()).choices[0].text
        b.prefill[old].status.drain()
        await until(b.app, lambda: serves(new))
        assert (await b.answer(max_tokens=2)).text() == "ab"
        assert len(b.decode[new].starts) == 1

        (session,), (ends, moves) = b.decode[old].sessions, [start.key for start in b.decode[old].starts]
        session.send(ends, 0, 2, [letter(2), letter(3)], LENGTH)
        assert (await whole(streams[0])).text() == "cd"
        session.fail(moves, decode_pb2.AttemptFailure.KIND_DRAINING)
        error = await refused(streams[1])
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "the workers of the checkpoint that began this output have left" in error.details()
        assert len(b.prefill[new].requests) == 1


async def test_a_prefill_worker_of_other_tickets_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = fleet() / "ticket.key"
    signs, other = TicketSigner(str(key)).key_id, b"\1" * 8
    taken: tuple[bytes, ...] = (other,)

    def change(stub: StubPrefill | StubDecode) -> None:
        # Nobody fetches from decode workers.
        stub.status.set_ticket_keys(lambda: taken if isinstance(stub, StubPrefill) else (other,))

    async with router_rig(tmp_path, change=change, ready=False, worker_wait_s=0, ticket_key=str(key)) as b:
        words = f"prefill worker prefill-0 at {b.prefill[0].address} is refused: it takes tickets of the keys "
        await until(
            b.app,
            lambda: f"{words}{other.hex()}, this router signs with {signs.hex()}" in b.app.pool.describe_missing(),
        )
        assert not b.app.pool.serving
        taken = (other, signs)
        b.prefill[0].status.notify()
        await until(b.app, lambda: b.app.pool.serving)
        assert (await b.answer(max_tokens=2)).text() == "ab"
        taken = (other,)
        b.prefill[0].status.notify()
        await until(b.app, lambda: not b.app.pool.serving)
        assert words in (await refused(b.call(max_tokens=2))).details()
    assert [record.levelname for record in caplog.records if words in record.getMessage()] == ["ERROR"] * 2


async def test_a_router_that_signs_no_tickets_refuses_a_worker_that_wants_some(tmp_path: Path) -> None:
    def change(stub: StubPrefill | StubDecode) -> None:
        stub.status.set_ticket_keys(lambda: (b"\1" * 8,))

    async with router_rig(tmp_path, change=change, ready=False, worker_wait_s=0) as b:
        await until(b.app, lambda: "refused: it requires tickets" in b.app.pool.describe_missing())
        assert "this router has no --ticket-key" in (await refused(b.call(max_tokens=2))).details()


async def test_an_error_for_clients_names_one_worker_and_not_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(stub: StubPrefill | StubDecode) -> None:
        if isinstance(stub, StubPrefill):
            stub.identify(model="x" * 1000)

    async with router_rig(tmp_path, prefill=6, change=change, ready=False, worker_wait_s=0) as b:
        await until(b.app, lambda: "workers refused: 6, lost: 0" in b.app.pool.describe_missing())
        said = (await refused(b.call(max_tokens=2))).details()
        assert said.startswith("no prefill worker is there; workers refused: 6, lost: 0; the first: prefill worker ")
        assert said.endswith("…")
        assert len(said) < 520
        assert sum(stub.address in said for stub in b.prefill) == 1
        assert all(stub.address in caplog.text for stub in b.prefill)


async def test_kv_of_another_dtype_is_accepted_where_it_is_converted(tmp_path: Path) -> None:
    half = KvFormat(tuple(type(part)(part.name, "bfloat16", part.shape) for part in KV.parts), KV.layers, KV.block_size)

    def change(stub: StubPrefill | StubDecode) -> None:
        if isinstance(stub, StubDecode):
            stub.identify(kv_format=half, converts_kv=True)

    async with router_rig(tmp_path, change=change) as b:
        assert (await b.answer(max_tokens=2)).text() == "ab"


async def test_health_follows_the_fleet(tmp_path: Path) -> None:
    async with router_rig(tmp_path, ready=False, worker_wait_s=0) as b:
        watch = health_pb2_grpc.HealthStub(b.channel).Watch(health_pb2.HealthCheckRequest())
        Status = health_pb2.HealthCheckResponse

        async def reaches(status: int) -> None:
            async with asyncio.timeout(60):
                async for response in watch:
                    if response.status == status:
                        return

        await reaches(Status.SERVING)
        b.decode[0].status.drain()
        await reaches(Status.NOT_SERVING)
        error = await refused(b.call(max_tokens=2))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (await b.answer(max_tokens=1)).text() == "a"


BAD: list[tuple[str, dict[str, Any]]] = [
    ("text", {"text": ""}),
    ("text", {"text": "x" * 63}),
    ("text", {"text": "x" * 4_000_000}),
    ("prompt", {}),
    ("token_ids", {"token_ids": {}}),
    ("token_ids", {"token_ids": {"ids": [1] * 65}}),
    ("token_ids[1]", {"token_ids": {"ids": [1, 300]}}),
    ("chat", {"chat": {"messages": [{"role": "user", "content": "x"}]}}),
    ("chat.messages", {"chat": {}}),
    ("chat.messages", {"chat": {"messages": [{"role": "user", "content": ""}] * 65}}),
    ("chat.messages[0].role", {"chat": {"messages": [{"content": "x"}]}}),
    ("chat.messages[0].role", {"chat": {"messages": [{"role": "u" * 4_000_000}]}}),
    ("allowed_token_ids", {"text": "x", "sampling": {"allowed_token_ids": [1] * 301}}),
    ("temperature", {"text": "x", "sampling": {"temperature": float("nan")}}),
    ("top_p", {"text": "x", "sampling": {"top_p": 0}}),
    ("stop", {"text": "x", "sampling": {"stop": ["x"] * 10_000}}),
    ("stop_token_ids[0]", {"text": "x", "sampling": {"stop_token_ids": [999]}}),
    ("max_tokens", {"text": "x", "sampling": {"max_tokens": 0}}),
    ("max_tokens", {"text": "x" * 9, "sampling": {"max_tokens": 60}}),
]


async def test_bad_input_is_answered_at_once_and_names_the_field(b: RouterRig) -> None:
    for name, fields in BAD:
        error = await refused(b.client.Generate(inference_pb2.GenerateRequest(**fields), timeout=60))
        assert (error.code(), error.details().partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, name)
    assert b.prefill[0].requests == []
    assert (await b.answer(max_tokens=3)).text() == "abc"


async def test_unknown_model_is_not_found_and_the_served_one_named(b: RouterRig, tmp_path: Path) -> None:
    error = await refused(b.client.Generate(inference_pb2.GenerateRequest(text="x", model="gpt")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == f"model: 'gpt' is not served; {tmp_path.name!r} is"


LIMITS: list[tuple[str, Any, Any]] = [
    ("n", MAX_CHOICES, MAX_CHOICES + 1),
    ("stop", ["#"] * MAX_STOP_STRINGS, ["#"] * (MAX_STOP_STRINGS + 1)),
    ("stop[1]", ["x", "#" * MAX_STOP_LENGTH], ["x", "#" * (MAX_STOP_LENGTH + 1)]),
    ("stop", ["#" * 1024] * 4, ["#" * 1024] * 4 + ["x"]),
    ("stop_token_ids", [299] * MAX_STOP_TOKEN_IDS, [299] * (MAX_STOP_TOKEN_IDS + 1)),
    ("logit_bias", dict.fromkeys(range(300), 1.0), dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    ("logit_bias[7]", {7: 100.0}, {7: 100.5}),
    ("logprobs", MAX_LOGPROBS, MAX_LOGPROBS + 1),
    ("prompt_logprobs", MAX_LOGPROBS, MAX_LOGPROBS + 1),
]


async def test_a_value_at_its_limit_is_served_and_one_beyond_refused_by_name(b: RouterRig) -> None:
    for served, (name, within, beyond) in enumerate(LIMITS):
        field = name.partition("[")[0]
        error = await refused(b.call(max_tokens=1, **{field: beyond}))
        assert (error.code(), error.details().partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, name)
        assert len(b.prefill[0].requests) == served
        assert (await b.answer(max_tokens=1, **{field: within})).usage.prompt_tokens == 3


async def test_messages_and_metadata_beyond_their_limits_are_refused_with_sizes(b: RouterRig) -> None:
    small = METADATA_BYTES // 2
    assert (await whole(b.client.Generate(request("hi", max_tokens=1), metadata=(("x", "y" * small),)))).events
    error = await refused(b.client.Generate(request("hi"), metadata=(("x", "y" * METADATA_MAX_BYTES),), timeout=60))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"vs. {METADATA_MAX_BYTES}" in (error.details() or "")
    largest = largest_request(MAX_MODEL_LEN, 300)
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
        with pytest.raises(InvalidRequest, match="token_ids: 64 prompt tokens leave no room for output"):
            await client.complete([5] * 64, timeout=60)


async def test_a_prompt_that_fits_no_prefill_worker_is_the_requests_fault_and_finds_one_that_it_fits() -> None:
    async with Fleet(bundled.path()) as fleet:
        small = await fleet.prefill(engine=FakeEngine(page_size=16, pages=2, max_model_len=400))
        decode = await fleet.decode(engine=FakeEngine(max_model_len=400))
        client = await fleet.router([small], [decode])
        load, before = small.worker.load_report(), count(REPLAYS, "refused")
        assert load.pages_total * load.page_size == 32
        problem = r"^token_ids: 33 prompt tokens do not fit the 32 that a prefill worker's KV memory holds$"
        with pytest.raises(InvalidRequest, match=problem):
            await client.complete([5] * 33, max_tokens=4, timeout=60)
        assert len((await client.complete([5] * 32, max_tokens=4, timeout=60, ignore_eos=True)).token_ids) == 4
        assert count(REPLAYS, "refused") == before
        large = await fleet.prefill(engine=FakeEngine(max_model_len=400))
        both = await fleet.router([small, large], [decode])
        for _ in range(4):
            done = await both.complete([5] * 33, max_tokens=4, temperature=0, timeout=60, ignore_eos=True)
            assert len(done.token_ids) == 4
