"""A fleet with mutual TLS, tickets for KV and API keys for clients: who gets in, and who does not.

The services are the real ones on real sockets; their engines are fake, so that every token is known.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import prefill_svc.app
from baton import AsyncClient, keys
from baton.config.worker import PrefillConfig
from baton.engine.fake import FakeEngine, expected_tokens
from baton.errors import ConfigError, Unauthenticated, Unavailable
from baton.rpc.channel import control_channel, kv_channel
from baton.rpc.tls import Tls
from baton.transfer.tickets import TicketSigner
from tests.certificates import copied, fleet, router, settings, tls, worker
from tests.decoding import LoggingEngine
from tests.fleet import SECRET, Fleet, serving

PROMPT = [5, 6, 7] * 20
WAIT_S = 60.0
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def engine(**changes: Any) -> FakeEngine:
    return FakeEngine(vocab_size=256, **changes)


async def until_missing(app: Any, words: str) -> str:
    """Reason why requests can't be served, once it contains `words`."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    handler = logging.Handler()
    handler.emit = lambda record: loop.call_soon_threadsafe(told.set)  # type: ignore[method-assign]
    logging.getLogger("router").addHandler(handler)
    try:
        async with asyncio.timeout(WAIT_S):
            while words not in app.pool.describe_missing():
                await told.wait()
                told.clear()
    except TimeoutError:
        pytest.fail(app.pool.describe_missing())
    finally:
        logging.getLogger("router").removeHandler(handler)
    return str(app.pool.describe_missing())


async def test_a_request_from_end_to_end(checkpoint: Path, tmp_path: Path) -> None:
    directory = fleet()
    api_keys = tmp_path / "api_keys.json"
    key = keys.add(api_keys, tenant="acme")
    async with Fleet(checkpoint) as running:
        prefill = await running.prefill(engine=engine(), fleet_secret=SECRET, **worker(directory, "prefill"))
        decode = await running.decode(engine=engine(), **worker(directory, "decode-1"))
        app = await running.start_router([prefill], [decode], **router(directory), api_keys=str(api_keys))
        await asyncio.wait_for(serving(app.address, tls("admin")), WAIT_S)
        assert {identity.principal for identity in app.pool.identities} == {
            "baton://prefill/prefill",
            "baton://decode/decode-1",
        }
        signs = TicketSigner(str(directory / "ticket.key")).key_id
        assert {identity.ticket_key_ids for identity in app.pool.identities} == {(signs,)}
        ca = directory / "ca.crt"
        async with AsyncClient(app.address, ca=ca, api_key=key) as client:
            completion = await client.complete(PROMPT, max_tokens=12, **GREEDY)
        assert completion.token_ids == expected_tokens(PROMPT, 12, vocab_size=256)
        refusals: list[tuple[type[Exception], dict[str, Any]]] = [
            (Unauthenticated, {"ca": ca}),
            (Unauthenticated, {"ca": ca, "api_key": key[:-1]}),
            (Unavailable, {"ca": fleet("theirs") / "ca.crt", "api_key": key}),
            (Unavailable, {"tls": True, "api_key": key}),
            (Unavailable, {"ca": ca, "api_key": key, "server_name": "baton.example.org"}),
            (Unavailable, {"api_key": key}),
        ]
        for error, security in refusals:
            async with asyncio.timeout(WAIT_S), AsyncClient(app.address, **security) as client:
                with pytest.raises(error):
                    await client.complete(PROMPT, max_tokens=2)
                with pytest.raises(error):
                    await client.get_model()


async def test_unexpected_workers_are_named(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = fleet(), fleet("theirs")
    async with Fleet(checkpoint) as running:
        prefill = await running.prefill(engine=engine(), **worker(ours, "prefill"))
        foreign = await running.decode(engine=engine(), **worker(theirs, "decode"))
        plain = await running.decode(engine=engine())
        app = await running.start_router([prefill], [foreign], worker_wait_s=0, **router(ours))
        words = await until_missing(app, "CERTIFICATE_VERIFY_FAILED")
        assert f"decode worker {foreign.addresses.control}: " in words
        assert f"can't watch decode worker {foreign.addresses.control}: " in caplog.text
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            async with AsyncClient(app.address, ca=ours / "ca.crt") as client:
                await client.complete(PROMPT, max_tokens=2, timeout=WAIT_S)
        # The address of a prefill worker in the list of decode workers, and one without TLS.
        app = await running.start_router([prefill], [prefill], **router(ours))
        await until_missing(app, "Hostname Verification Check failed")
        app = await running.start_router([prefill], [plain], **router(ours))
        await until_missing(app, f"decode worker {plain.addresses.control}: ")


async def test_a_process_with_the_certificate_of_another_role_does_not_start(checkpoint: Path) -> None:
    """Before it loads a model: here is none."""
    words = r"^tls_cert: '.*{}.crt' must name {}, it names .*{}.baton"
    async with Fleet(Path("/nowhere")) as running:
        with pytest.raises(ConfigError, match=words.format("prefill", "decode.baton", "prefill")):
            await running.decode(**worker(fleet(), "prefill"))
        with pytest.raises(ConfigError, match=words.format("decode-1", "prefill.baton", "decode")):
            await running.prefill(**worker(fleet(), "decode-1"))
    async with Fleet(checkpoint) as running:
        prefill = await running.prefill(engine=engine())
        with pytest.raises(ConfigError, match=words.format("client", "router.baton", "client")):
            await running.start_router([prefill], [prefill], **router(fleet(), "client"), model="/nowhere")


@contextlib.asynccontextmanager
async def prefill_worker(checkpoint: Path, files: Path, **settings: Any) -> AsyncIterator[Any]:
    """A worker whose life is its own, so that it can be restarted at its address."""
    config = PrefillConfig(model=str(checkpoint), served_model_name="m", **worker(files, "prefill"), **settings)
    async with prefill_svc.app.run(config, engine=engine()) as app:
        yield app


async def test_certificates_are_replaced_under_a_running_stream(checkpoint: Path, tmp_path: Path) -> None:
    """Another CA for the whole fleet: the stream goes on, whatever connects afterwards uses the new certificates."""
    old, new = fleet(), fleet("theirs")
    files = copied(tmp_path / "files", "router", "prefill", "decode", "admin")
    slow = LoggingEngine(vocab_size=256)
    admin = Tls(*(str(files / name) for name in ("admin.crt", "admin.key", "ca.crt")))
    expected = expected_tokens(PROMPT, 40, vocab_size=256)
    async with Fleet(checkpoint) as running, contextlib.AsyncExitStack() as restarted:
        first = await restarted.enter_async_context(contextlib.AsyncExitStack())
        prefill = await first.enter_async_context(prefill_worker(checkpoint, files))
        decode = await running.decode(engine=slow, **worker(files, "decode"))
        app = await running.start_router([prefill], [decode], **router(files))
        await asyncio.wait_for(serving(app.address, admin), WAIT_S)
        client = await restarted.enter_async_context(AsyncClient(app.address, ca=old / "ca.crt"))
        stream = client.generate(PROMPT, max_tokens=40, **GREEDY)
        got = [token.token_id for _ in range(2) for token in (await anext(stream)).tokens]
        slow.gate.clear()

        copied(files, "router", "prefill", "decode", "admin", source=new)
        for dial, name, address in (
            (kv_channel, "decode", prefill.addresses.kv),
            (control_channel, "router", prefill.addresses.control),
        ):
            assert await reaches(dial(address, tls(name, new), "prefill"))
            assert not await reaches(dial(address, tls(name, old), "prefill"))
        stranger = await restarted.enter_async_context(
            AsyncClient(app.address, ca=old / "ca.crt", server_name="localhost")
        )
        with pytest.raises(Unavailable):
            await stranger.get_model(timeout=WAIT_S)
        new_client = await restarted.enter_async_context(AsyncClient(app.address, ca=new / "ca.crt"))
        assert (await new_client.get_model(timeout=WAIT_S)).name == "m"

        slow.gate.set()
        async for delta in stream:
            got += [token.token_id for token in delta.tokens]
        assert got == expected
        again = await new_client.complete(PROMPT, max_tokens=40, timeout=WAIT_S, **GREEDY)
        assert again.token_ids == expected

        # The router dials the worker anew, with the files as they are now.
        address = prefill.addresses.control
        await first.aclose()
        await until_missing(app, f"prefill worker {address}: ")
        await restarted.enter_async_context(prefill_worker(checkpoint, files, control=address))
        await asyncio.wait_for(serving(app.address, admin), WAIT_S)
        last = await new_client.complete(PROMPT, max_tokens=40, timeout=WAIT_S, **GREEDY)
        assert last.token_ids == expected


async def reaches(channel: grpc.aio.Channel) -> bool:
    """Whether the peer answers; closes the channel."""
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


@pytest.mark.parametrize("field", ["control", "kv"])
async def test_a_worker_that_could_be_reached_names_what_lacks(checkpoint: Path, field: str) -> None:
    async with Fleet(Path("/nowhere")) as running:
        # Judged before a model is loaded: here is none.
        with pytest.raises(ConfigError, match=f"^{field}: 0.0.0.0:0 can be .* and ticket_keys is not set"):
            await running.decode(**{field: "0.0.0.0:0"}, **settings(fleet(), "decode"))
        with pytest.raises(ConfigError, match=r"^ticket_keys: '/nowhere' can't be read"):
            await running.decode(**{**worker(fleet(), "decode"), "ticket_keys": "/nowhere"})
    async with Fleet(checkpoint) as running:
        with pytest.raises(
            ConfigError, match=f"^{field}: 0.0.0.0:0 can be .* tls_cert, tls_key, tls_ca, ticket_keys are"
        ):
            await running.prefill(engine=engine(), **{field: "0.0.0.0:0"})
        with pytest.raises(ConfigError, match=f"^{field}: 0.0.0.0:0 can be .* and ticket_keys is not set"):
            await running.prefill(engine=engine(), **{field: "0.0.0.0:0"}, **settings(fleet(), "prefill"))
        await running.prefill(engine=engine(), **{field: "0.0.0.0:0"}, **worker(fleet(), "prefill"))


async def test_a_router_that_could_be_reached_names_what_lacks(checkpoint: Path, tmp_path: Path) -> None:
    async with Fleet(checkpoint) as running:
        prefill = await running.prefill(engine=engine())
        with pytest.raises(ConfigError, match=r"^grpc: 0\.0\.0\.0:0 can be .* tls_cert, tls_key, tls_ca, api_keys are"):
            await running.start_router([prefill], [prefill], grpc="0.0.0.0:0", model="/nowhere")
        with pytest.raises(ConfigError, match=r"^grpc: 0\.0\.0\.0:0 can be .* and api_keys is not set"):
            await running.start_router([prefill], [prefill], grpc="0.0.0.0:0", **router(fleet()))
        keys.add(tmp_path / "keys.json", tenant="acme")
        secure = {**router(fleet()), "api_keys": str(tmp_path / "keys.json")}
        await running.start_router([prefill], [prefill], grpc="0.0.0.0:0", **secure)
