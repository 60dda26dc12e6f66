"""Placement of a prompt whose prefix is somewhere already, over real gRPC, between stub workers."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from baton.kv.hashing import block_digests, chain_root, request_salt
from baton.pb import decode_pb2, inference_pb2, kv_pb2, prefill_pb2
from baton.request import MAX_CACHE_SALT_BYTES, PrefixSource, RemoteExport
from baton.rpc.convert import prefix_source_from_proto
from baton.transfer.tickets import TicketSigner
from tests.integration.router_rig import Answer, RouterRig, refused, router_rig, until, whole
from tests.integration.router_stubs import KV, DownStream, StubDecode, StubPrefill, letter

PROMPT = [3] * 100
OTHER = [[4 + i] * 100 for i in range(6)]
BLOCKS = len(PROMPT) // KV.block_size


def longer(stub: StubPrefill | StubDecode) -> None:
    stub.identify(max_model_len=4096)


async def ask(b: RouterRig, prompt: list[int], **fields: Any) -> Answer:
    sampling = {"max_tokens": 3} | fields.pop("sampling", {})
    token_ids = inference_pb2.TokenIds(ids=prompt)
    request = inference_pb2.GenerateRequest(token_ids=token_ids, sampling=sampling, **fields)
    return await whole(b.client.Generate(request, timeout=60))


def served(stubs: list[StubPrefill]) -> list[int]:
    """Number of prompts that each worker was given."""
    return [len(stub.requests) for stub in stubs]


def digests(prompt: list[int], salt: bytes = b"") -> list[bytes]:
    return block_digests(chain_root("f" * 64, KV.digest, salt), prompt, KV.block_size)


async def hold(b: RouterRig, stub: StubPrefill | StubDecode, prompt: list[int], *, dropped: bool = False) -> None:
    """Have a worker tell that it holds a prompt's blocks, or no longer does, and the router hear of it."""
    chain, directory = digests(prompt), b.app.pool.prefixes
    match = directory.match_prefill if isinstance(stub, StubPrefill) else directory.match_decode
    stub.pages.tell([] if dropped else chain, chain if dropped else [])

    def known() -> int:
        return match(dict.fromkeys(b.app.pool.namespaces, chain)).tokens(stub.address)

    await until(b.app, lambda: known() == (0 if dropped else len(chain) * KV.block_size))


async def test_a_prompt_goes_where_it_went_before_and_others_elsewhere(tmp_path: Path) -> None:
    async with router_rig(tmp_path, prefill=3, change=longer) as b:
        await ask(b, PROMPT)
        first = served(b.prefill).index(1)
        for other in OTHER:
            await ask(b, other)
            await ask(b, [*PROMPT, *other])
        counts = served(b.prefill)
        assert counts[first] == 1 + len(OTHER)
        assert sorted(counts) == [3, 3, 1 + len(OTHER)]
        assert {bytes(request.cache_salt) for stub in b.prefill for request in stub.requests} == {b""}


async def test_reports_of_workers_override_the_routers_memory(tmp_path: Path) -> None:
    async with router_rig(tmp_path, prefill=2, change=longer) as b:
        await ask(b, PROMPT)
        first = served(b.prefill).index(1)
        there, here = b.prefill[first], b.prefill[1 - first]
        await hold(b, here, [*PROMPT, *OTHER[0]])
        await ask(b, [*PROMPT, *OTHER[0]])
        assert len(here.requests) == 1
        await hold(b, there, [*PROMPT, *OTHER[1]])
        await hold(b, there, [*PROMPT, *OTHER[1]], dropped=True)
        await ask(b, PROMPT)
        assert len(here.requests) == 2
        # Its watch ends: nothing that it told counts for what comes back under its name.
        tiers = await b.app.pool.prefixes.tiers()
        assert (tiers[0].name, tiers[0].blocks > 0) == ("index", True)
        here.status.close()
        await until(b.app, lambda: len(b.app.pool.fleet.prefill) == 1)
        chains = dict.fromkeys(b.app.pool.namespaces, digests(PROMPT))
        await until(b.app, lambda: b.app.pool.prefixes.match_prefill(chains).tokens(here.address) == 0)
        await ask(b, PROMPT)
        assert len(there.requests) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": inference_pb2.CACHE_POLICY_OFF},
        {"cache": inference_pb2.CACHE_POLICY_WRITE},
        {"sampling": {"prompt_logprobs": 0}},
    ],
)
async def test_a_request_that_may_not_read_the_cache_is_drawn_nowhere(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with router_rig(tmp_path, prefill=2, change=longer) as b:
        await hold(b, b.prefill[0], PROMPT)
        await hold(b, b.decode[0], PROMPT)
        for _ in range(4):
            await ask(b, PROMPT, **fields)
        assert served(b.prefill) == [2, 2]
        assert {bytes(reserve.prefix_digests) for reserve in b.decode[0].reserves} == {b""}
        policies = Counter(request.cache for stub in b.prefill for request in stub.requests)
        asked = fields.get("cache", inference_pb2.CACHE_POLICY_READ_WRITE)
        assert policies == {asked: 4}
        assert {reserve.cache for reserve in b.decode[0].reserves} == {asked}


async def test_a_request_that_leaves_no_blocks_draws_no_other(tmp_path: Path) -> None:
    async with router_rig(tmp_path, prefill=2, change=longer) as b:
        for _ in range(4):
            await ask(b, PROMPT, cache=inference_pb2.CACHE_POLICY_READ)
        assert served(b.prefill) == [2, 2]


async def test_salts_set_requests_apart_and_bad_fields_are_named(tmp_path: Path) -> None:
    async with router_rig(tmp_path, prefill=2, change=longer, fleet_secret="secret") as b:
        await ask(b, PROMPT, cache_salt="a")
        await ask(b, PROMPT, cache_salt="b")
        assert served(b.prefill) == [1, 1]
        await ask(b, PROMPT, cache_salt="a")
        salts = {salt: request_salt("secret", "", salt) for salt in "ab"}
        told = [[bytes(request.cache_salt) for request in stub.requests] for stub in b.prefill]
        assert sorted(told, key=len) == [[salts["b"]], [salts["a"]] * 2]
        assert [bytes(reserve.cache_salt) for reserve in b.decode[0].reserves] == [salts["a"], salts["b"], salts["a"]]
        for fields, words in (
            ({"cache": 99}, "cache: must be one of read_write, read, write, off, got 99"),
            ({"cache_salt": "é" * 129}, f"cache_salt: may have at most {MAX_CACHE_SALT_BYTES} bytes, got 258"),
        ):
            request = inference_pb2.GenerateRequest(text="hi", sampling={"max_tokens": 1}, **fields)  # type: ignore[arg-type]
            error = await refused(b.client.Generate(request, timeout=60))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in (error.details() or "")
        longest = "é" * (MAX_CACHE_SALT_BYTES // 2)
        assert (await ask(b, PROMPT, cache_salt=longest)).text()


def pins(tokens: int) -> Any:
    def answer(reserve: decode_pb2.Reserve) -> decode_pb2.ReserveResult:
        return decode_pb2.ReserveResult(
            key=reserve.key, granted=True, cached_tokens=tokens if reserve.prefix_digests else 0
        )

    return answer


async def test_decode_gets_digests_to_pin_and_prefill_the_peer_to_fetch_from(tmp_path: Path) -> None:
    async with router_rig(tmp_path, decode=2, change=longer) as b:
        held = BLOCKS * KV.block_size
        b.decode[1].answer = pins(held)
        await hold(b, b.decode[1], PROMPT)
        b.prefill[0].cached_tokens = 5
        answer = await ask(b, [*PROMPT, *OTHER[0], *OTHER[1], *OTHER[2]])
        (reserve,), (start,), (request,) = b.decode[1].reserves, b.decode[1].starts, b.prefill[0].requests
        chain = digests([*PROMPT, *OTHER[0], *OTHER[1], *OTHER[2]])
        # Blocks that it is thought to hold, and some more.
        assert reserve.prefix_digests == b"".join(chain[: BLOCKS + 16])
        assert start.prefix_transfer_id == request.prefix_source.export.transfer_id != start.source.transfer_id
        shard = replace(KV.whole, kv_address="127.0.0.1:7001")
        export = RemoteExport(start.prefix_transfer_id, "incarnation-decode-1", (shard,))
        assert prefix_source_from_proto(request.prefix_source) == PrefixSource(export, held)
        assert (answer.usage.cached_tokens, answer.usage.cached.decode) == (5, held)
        # Now prefill has had the prompt too, and need not fetch it.
        await ask(b, PROMPT)
        assert not b.prefill[0].requests[1].HasField("prefix_source")
        assert b.decode[1].starts[1].prefix_transfer_id == ""
        # Another prompt has nothing to do with any of this.
        await ask(b, OTHER[5])
        assert [bool(r.prefix_digests) for stub in b.decode for r in stub.reserves].count(False) == 1
        assert not b.prefill[0].requests[2].HasField("prefix_source")


@pytest.mark.parametrize(("more_blocks", "offered"), [(1, True), (0, False)])
async def test_decode_is_offered_if_it_has_a_block_more(tmp_path: Path, more_blocks: int, offered: bool) -> None:
    # An offer costs an open export and no more: prefill fetches only what it computes more slowly, by measured rates.
    has = 2 * KV.block_size
    async with router_rig(tmp_path, change=longer) as b:
        b.decode[0].answer = pins(has + more_blocks * KV.block_size)
        await hold(b, b.prefill[0], PROMPT[:has])
        await hold(b, b.decode[0], PROMPT)
        await ask(b, PROMPT)
        assert b.prefill[0].requests[0].HasField("prefix_source") == offered
        assert bool(b.decode[0].starts[0].prefix_transfer_id) == offered


@pytest.mark.parametrize("known", [True, False])
async def test_a_source_needs_a_ticket_where_decode_asks_for_one(tmp_path: Path, known: bool) -> None:
    path = tmp_path / "ticket.pem"
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    asks = TicketSigner(str(path)).key_id if known else b"\1" * 8

    def change(stub: StubPrefill | StubDecode) -> None:
        longer(stub)
        if isinstance(stub, StubDecode):
            stub.answer = pins(96)
            stub.status.set_ticket_keys(lambda: (asks,))

    async with router_rig(tmp_path, change=change, ticket_key=str(path)) as b:
        await hold(b, b.decode[0], PROMPT)
        await ask(b, PROMPT)
        (request,), (start,) = b.prefill[0].requests, b.decode[0].starts
        assert b.decode[0].reserves[0].prefix_digests
        assert request.HasField("prefix_source") is bool(start.prefix_transfer_id) is known
        if known:
            ticket = kv_pb2.Ticket.FromString(
                kv_pb2.SignedTicket.FromString(request.prefix_source.export.ticket).ticket
            )
            assert (ticket.transfer_id, ticket.incarnation) == (start.prefix_transfer_id, "incarnation-decode-0")
            assert ticket.consumer == "incarnation-prefill-0"


async def test_a_replay_is_found_by_prompt_and_output_and_usage_tells_of_the_first_attempt(tmp_path: Path) -> None:
    async with router_rig(tmp_path, decode=2, change=longer) as b:
        first = asyncio.Event()

        async def some_then_fail(down: DownStream, start: decode_pb2.Start, _: prefill_pb2.PrefillRequest) -> None:
            # Decode's tokens may overtake prefill's, which would then be no part of the replay.
            await first.wait()
            down.send(start.key, 0, 1, [letter(i) for i in range(1, 20)])
            down.fail(start.key, decode_pb2.AttemptFailure.KIND_ENGINE)

        b.decode[0].answer, b.decode[0].script = pins(96), some_then_fail
        await hold(b, b.decode[0], PROMPT)
        replay = [*PROMPT, *(letter(i) for i in range(20))]
        await hold(b, b.decode[1], replay)
        b.decode[1].answer = pins(112)
        b.decode[1].load = replace(b.decode[1].load, slots_used=8)
        b.decode[1].status.notify()
        await until(b.app, lambda: min(view.free_slots for view in b.app.pool.fleet.decode.values()) == 0)
        b.prefill[0].cached_tokens = 7
        ids, sampling = inference_pb2.TokenIds(ids=PROMPT), inference_pb2.SamplingParams(max_tokens=25)
        call = b.client.Generate(inference_pb2.GenerateRequest(token_ids=ids, sampling=sampling), timeout=60)
        events = [await call.read()]
        first.set()
        answer = Answer([*events, *(await whole(call)).events])
        assert answer.tokens() == [letter(i) for i in range(25)]
        assert b.decode[1].reserves[0].prefix_digests == b"".join(digests(replay))
        assert (answer.usage.cached_tokens, answer.usage.cached.decode) == (7, 96)
