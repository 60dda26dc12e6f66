"""Listeners of workers and router against bytes, messages and sessions that make no sense.

Each call ends, in time, with a status that blames the caller; the worker is healthy afterwards and holds nothing.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

import grpc
from google.protobuf.message import Message

from baton.engine.fake import FakeEngine, expected_tokens
from baton.pb import decode_pb2, inference_pb2, kv_pb2, prefill_pb2
from baton.rpc.channel import control_channel
from baton.rpc.convert import sampling_to_proto
from baton.worker.status import WIRE_VERSION
from tests.decode_rig import key, rig
from tests.decoding import digests
from tests.fuzz.messages import one_wrong, senseless
from tests.fuzz.mutation import arbitrary, mutated
from tests.fuzz.storm import (
    ALLOWED,
    LEDGER,
    WAIT_S,
    WATCH,
    Method,
    call,
    calls,
    chatter,
    garbage,
    hang_ups,
    healthy,
    kv_methods,
    storm,
)
from tests.integration.router_rig import request, router_rig
from tests.mixed_rig import mixed
from tests.prefill import GREEDY, serving

PREFILL = (
    Method(
        "/baton.v1.Prefill/Prefill",
        True,
        prefill_pb2.PrefillRequest(
            request_id="r", prompt_token_ids=range(40), choice_indexes=[0], sampling=sampling_to_proto(GREEDY)
        ),
    ),
    Method("/baton.v1.Prefill/Abandon", False, prefill_pb2.AbandonRequest(transfer_id="t")),
    WATCH,
    LEDGER,
)


async def test_prefill_blames_the_caller() -> None:
    # KV prefilled for a transfer is held until nobody has asked for it in time.
    async with serving(lease_s=0.5) as client:
        addresses = client.app.addresses
        await calls("Prefill, Watch, Ledger", 300, addresses.control, PREFILL)
        await client.pages_back()


async def test_kv_blames_the_caller() -> None:
    async with serving() as client:
        incarnation = client.app.status.identity.incarnation
        for number in range(3):
            await client.done(transfer_id=f"t{number}")
        names, kv, methods = ["t0", "t1", "t2", incarnation], client.app.addresses.kv, kv_methods(incarnation)
        # First without releases, after which there is little to be asked for.
        await calls("FetchKv", 100, kv, methods[:1], names)
        await calls("FetchKv, ReleaseKv", 60, kv, methods, names)
        async with control_channel(client.app.addresses.kv) as channel:
            for name in names[:3]:
                release = kv_pb2.ReleaseKvRequest(transfer_id=name, incarnation=incarnation)
                method = Method("/baton.v1.Kv/ReleaseKv", False, release)
                ended = await call(channel, method, release.SerializeToString())
                assert ended.code is grpc.StatusCode.OK
        await client.pages_back()


async def test_prefill_survives_garbage_on_its_sockets() -> None:
    async with serving() as client:
        addresses = client.app.addresses
        await hang_ups("sockets of a prefill worker", 120, [addresses.control, addresses.kv, addresses.ops])
        assert await healthy(addresses.control)
        assert await healthy(addresses.kv)
        assert (await client.done()).first_tokens


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


async def test_sessions_of_nonsense_leave_nothing() -> None:
    async with rig(pages=32) as r:
        control = r.app.addresses.control
        names = ["r0", "r1", "r2", r.exporter.address, "inc-1"]
        # One block that is there to be pinned.
        prompt = list(range(20))
        router = await r.router()
        await router.request("before", prompt, GREEDY)
        await router.until_finished(("before", 0))
        named = b"".join(digests(r.engine, prompt))

        async def send(rng: random.Random) -> None:
            sent = _session(rng, names, named)
            async with control_channel(control) as channel:
                ended = await chatter(channel, "/baton.v1.Decode/Session", sent, rng)
            assert ended.code in ALLOWED, ended

        await storm("Session: messages", 150, send)
        await calls("Decode: Watch, Ledger", 40, control, [WATCH, LEDGER])
        await calls("Decode: FetchKv", 60, r.app.addresses.kv, kv_methods("inc-1"))
        await hang_ups("sockets of a decode worker", 60, [control, r.app.addresses.kv, r.app.addresses.ops])
        assert await healthy(control)
        await r.until_free()


async def test_a_mixed_worker_blames_the_caller() -> None:
    """Sessions and prompts are about the same few transfers, some of them in place."""
    engine = FakeEngine(page_size=4, pages=64, slots=4)
    async with mixed(engine, lease_s=0.5, start_timeout_s=0.5) as (app, workers):
        control, kv, incarnation = app.addresses.control, app.addresses.kv, app.status.identity.incarnation
        names = ["r0", "r1", "r2", kv, incarnation, "t0", "t1"]
        prompt = list(range(40))
        worker = await workers.connect(app)
        await workers.complete(worker, worker, prompt, GREEDY)
        named = b"".join(digests(engine, prompt))
        prefill = Method("/baton.v1.Prefill/Prefill", True, prefill_pb2.PrefillRequest())
        abandon = Method("/baton.v1.Prefill/Abandon", False, prefill_pb2.AbandonRequest(transfer_id="t0"))

        async def send(rng: random.Random) -> None:
            async with control_channel(control) as channel:
                if rng.random() < 0.5:
                    messages = _session(rng, names, named, incarnation)
                    ended = await chatter(channel, "/baton.v1.Decode/Session", messages, rng)
                else:
                    prefill.sound.CopyFrom(PREFILL[0].sound)
                    prefill.sound.transfer_id = rng.choice(names[5:])
                    prefill.sound.in_place = rng.random() < 0.7
                    method = rng.choice((prefill, prefill, prefill, abandon))
                    ended = await call(channel, method, method.request(rng, names))
            assert ended.code in ALLOWED, ended

        await storm("mixed: sessions and prompts", 200, send)
        await calls("mixed: Watch, Ledger", 40, control, [WATCH, LEDGER])
        await calls("mixed: FetchKv", 60, kv, kv_methods(incarnation), names)
        await hang_ups("sockets of a mixed worker", 60, [control, kv, app.addresses.ops])
        assert await healthy(control)
        assert await healthy(kv)
        async with asyncio.timeout(WAIT_S):
            while engine.stats().used or not (app.prefill.idle and app.decode.idle):  # noqa: ASYNC110 pages return on several threads
                await asyncio.sleep(0.01)
        assert (await app.audit.ledger()).entries == ()
        answer = await workers.complete(worker, worker, [*prompt, 3], GREEDY)
        assert answer.tokens == [expected_tokens([*prompt, 3], GREEDY.max_tokens or 0, params=GREEDY)]


def _session(rng: random.Random, names: Sequence[str], named: bytes, incarnation: str = "inc-1") -> list[bytes]:
    """Commands about few attempts, so that they meet; most are sound in themselves."""
    sent: list[Message] = []
    if rng.random() >= 0.1:
        hello = decode_pb2.Hello(router_id=rng.choice(("", "router")), wire_version=WIRE_VERSION)
        sent.append(decode_pb2.SessionUp(hello=hello))
    for _ in range(rng.randrange(1, 25)):
        sent.append(_command(rng, names, named, sent, incarnation))
    data = [message.SerializeToString() for message in sent]
    if rng.random() < 0.2:
        at = rng.randrange(len(data) or 1)
        data[at : at + 1] = [mutated(rng, data[at]) if data and rng.random() < 0.7 else arbitrary(rng)]
    return data


def _command(
    rng: random.Random, names: Sequence[str], named: bytes, sent: Sequence[Message], incarnation: str
) -> Message:
    attempt = key(rng.choice(names[:3]), rng.choice((0, 0, 0, 1)))
    up = decode_pb2.SessionUp()
    match rng.randrange(8):
        case 0 | 1 | 2:
            up.reserve.CopyFrom(_reserve(rng, attempt, named))
        case 3 | 4:
            up.start.CopyFrom(_start(rng, attempt, names[3], incarnation))
        case 5:
            up.cancel.CopyFrom(decode_pb2.Cancel(key=attempt))
            if rng.random() < 0.5:
                up.cancel.choice_index = rng.choice((0, 1, 7, 2**32 - 1))
        case 6:
            up.heartbeat.SetInParent()
            up.heartbeat.live.extend(key(name) for name in rng.sample(names[:3], rng.randrange(4)))
        case _:
            return senseless(rng, up, names) if rng.random() < 0.5 else one_wrong(rng, sent[-1] if sent else up, names)
    return up


def _reserve(rng: random.Random, attempt: decode_pb2.AttemptKey, named: bytes) -> decode_pb2.Reserve:
    reserve = decode_pb2.Reserve(
        key=attempt,
        context_tokens=rng.choice((4, 20, 200, 2**32 - 1)),
        max_new_tokens=rng.choice((1, 8, 2**31)),
        choices=rng.choice((1, 1, 2)),
        deadline_ms=rng.choice((0, 1, 2000, 2**63)),
        prefix_digests=rng.choice((b"", b"x" * 32, named)),
        cache_salt=rng.choice((b"", b"salt")),
        cache=rng.randrange(5),
    )
    if rng.random() < 0.1:
        # A malformed reservation ends the session.
        malformed = (
            ("context_tokens", 0),
            ("max_new_tokens", 0),
            ("choices", rng.choice((0, 100))),
            ("prefix_digests", rng.choice((b"x" * 31, rng.randbytes(1 << 16)))),
            ("cache_salt", b"x" * 300),
            ("cache", 6),
        )
        setattr(reserve, *rng.choice(malformed))
    return reserve


def _start(rng: random.Random, attempt: decode_pb2.AttemptKey, address: str, incarnation: str) -> decode_pb2.Start:
    shards = [
        kv_pb2.Shard(
            kv_address=rng.choice(("", "127.0.0.1:1", "nonsense", ":0", address)),
            layer_end=rng.choice((0, 2, 4, 2**32 - 1)),
            head_end=rng.choice((0, 2, 4, 2**32 - 1)),
        )
        for _ in range(rng.choice((0, 1, 1, 2)))
    ]
    return decode_pb2.Start(
        key=attempt,
        source=kv_pb2.RemoteExport(
            transfer_id=rng.choice(("", "t0", "t1")),
            incarnation=rng.choice(("", incarnation, "another")),
            shards=shards,
        ),
        deadline_ms=rng.choice((0, 1, 2000, 2**63)),
        prefix_transfer_id=rng.choice(("", "p0", "p1", "t0")),
    )


async def test_a_session_that_is_never_heard_of_again() -> None:
    """A peer that hangs up in the middle of a message."""
    async with rig(pages=32) as r:
        with contextlib.suppress(ConnectionError):
            await garbage(r.app.addresses.control, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0\0\xff")
        router = await r.router()
        await router.request("after", list(range(9)), GREEDY)
        await router.until_finished(("after", 0))
        await router.cancel("after")
        await r.until_free()
