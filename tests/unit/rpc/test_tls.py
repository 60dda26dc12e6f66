"""TLS over real sockets: who gets in, what is said to who does not, and files that change under way."""

import asyncio
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import errors
from baton.cli.certs import issue
from baton.pb import inference_pb2 as pb
from baton.pb import inference_pb2_grpc
from baton.rpc.channel import CLIENT_OPTIONS, control_channel, kv_channel
from baton.rpc.tls import Tls
from tests.certificates import copied, fleet, settings, tls
from tests.fake_router import Router, served

WAIT_S = 60.0


async def ask(channel: grpc.aio.Channel, **keywords: Any) -> None:
    async with channel:
        await inference_pb2_grpc.InferenceStub(channel).Tokenize(pb.TokenizeRequest(text="x"), timeout=60, **keywords)


async def refused(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel)
    return caught.value.code(), caught.value.details()


def test_without_settings_there_is_no_tls() -> None:
    assert Tls.load(SimpleNamespace(tls_cert="", tls_key="", tls_ca=""), "router") is None


@pytest.mark.parametrize("lacking", ["tls_cert", "tls_key", "tls_ca"])
def test_a_missing_setting_or_file_is_named(lacking: str, tmp_path: Path) -> None:
    files = settings(fleet(), "router")
    with pytest.raises(errors.ConfigError, match=rf"^{lacking}: is missing, but"):
        Tls.load(SimpleNamespace(**{**files, lacking: ""}), "router")
    with pytest.raises(errors.ConfigError, match=rf"^{lacking}: '/nowhere' can't be read: No such file"):
        Tls.load(SimpleNamespace(**{**files, lacking: "/nowhere"}), "router")
    (tmp_path / "empty").write_text("")
    with pytest.raises(errors.ConfigError, match=rf"^{lacking}: .*empty' holds no"):
        Tls.load(SimpleNamespace(**{**files, lacking: str(tmp_path / "empty")}), "router")


def test_files_that_do_not_match_are_named(tmp_path: Path) -> None:
    ours, theirs = settings(fleet(), "router"), settings(fleet("theirs"), "router")
    with pytest.raises(errors.ConfigError, match=r"^tls_key: .* is not the key of"):
        Tls.load(SimpleNamespace(**{**ours, "tls_key": theirs["tls_key"]}), "router")
    with pytest.raises(errors.ConfigError, match=r"^tls_ca: .* does not hold the CA that signed"):
        Tls.load(SimpleNamespace(**{**ours, "tls_ca": theirs["tls_ca"]}), "router")
    bundle = tmp_path / "both.crt"
    bundle.write_bytes(Path(theirs["tls_ca"]).read_bytes() + Path(ours["tls_ca"]).read_bytes())
    assert Tls.load(SimpleNamespace(**{**ours, "tls_ca": str(bundle)}), "router")


def test_an_expired_certificate_is_named(tmp_path: Path) -> None:
    for file in ("ca.crt", "ca.key"):
        (tmp_path / file).write_bytes((fleet() / file).read_bytes())
    # No longer than the hour by which certificates are dated back.
    issue(tmp_path, "router", "old", days=0)
    with pytest.raises(errors.ConfigError, match=r"^tls_cert: .*old\.crt' expired at 20"):
        tls("old", tmp_path)


async def test_both_sides_know_each_other(router: Router) -> None:
    async with served(router, tls=tls("prefill"), roles=("router", "decode")) as listener:
        await ask(control_channel(listener.address, tls("router"), "prefill"))
        await ask(kv_channel(listener.address, tls("decode-1")))
    assert [caller[1:] for caller in router.callers] == [
        ("baton://router/router", frozenset({"router"})),
        ("baton://decode/decode-1", frozenset({"decode"})),
    ]
    assert tls("decode-1").principal == "baton://decode/decode-1"


async def test_peers_of_a_mixed_worker_know_it_as_a_worker_of_either_role(router: Router) -> None:
    async with served(router, tls=tls("mixed"), roles=("router", "decode")) as listener:
        for role in ("mixed", "prefill", "decode"):
            await ask(control_channel(listener.address, tls("router"), role))
            await ask(kv_channel(listener.address, tls("mixed"), role))
    assert {caller[1:] for caller in router.callers if caller.principal != "baton://router/router"} == {
        ("baton://mixed/mixed", frozenset({"mixed", "prefill", "decode"}))
    }
    with pytest.raises(errors.ConfigError, match=r"must name mixed\.baton and prefill\.baton, it names baton:"):
        Tls.load(SimpleNamespace(**settings(fleet(), "decode")), "mixed")
    assert Tls.load(SimpleNamespace(**settings(fleet(), "mixed")), "mixed") is not None


async def test_a_caller_of_another_role_is_refused_by_name(router: Router) -> None:
    async with served(router, tls=tls("decode"), roles=("router", "admin")) as listener:
        code, details = await refused(control_channel(listener.address, tls("prefill"), "decode"))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert details == "the caller's certificate is that of prefill, not of router or admin"
        async with control_channel(listener.address, tls("prefill"), "decode") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="that of prefill"):
                await inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest()).read()
            with pytest.raises(grpc.aio.AioRpcError, match="that of prefill"):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert router.callers == []


async def test_peers_of_another_ca_get_an_error_and_no_answer(router: Router) -> None:
    theirs = tls("router", fleet("theirs"))
    ours = (fleet() / "ca.crt").read_bytes()
    trusting_us = grpc.ssl_channel_credentials(
        ours, (fleet("theirs") / "router.key").read_bytes(), (fleet("theirs") / "router.crt").read_bytes()
    )
    name = [("grpc.ssl_target_name_override", "prefill.baton")]
    async with served(router, tls=tls("prefill"), roles=("router",)) as listener:
        unavailable = {
            "trusts another CA": control_channel(listener.address, theirs, "prefill"),
            "is of another CA": grpc.aio.secure_channel(listener.address, trusting_us, options=name),
            "has no certificate": grpc.aio.secure_channel(
                listener.address, grpc.ssl_channel_credentials(ours), options=name
            ),
            "speaks in the clear": control_channel(listener.address),
            "expects another role": control_channel(listener.address, tls("router"), "decode"),
        }
        found = {what: await refused(channel) for what, channel in unavailable.items()}
        assert {code for code, _ in found.values()} == {grpc.StatusCode.UNAVAILABLE}, found
        assert "CERTIFICATE_VERIFY_FAILED" in found["trusts another CA"][1]
        assert "Hostname Verification" in found["expects another role"][1]
    async with served(router) as listener:
        code, _ = await refused(control_channel(listener.address, tls("router"), "prefill"))
        assert code is grpc.StatusCode.UNAVAILABLE
    assert router.callers == []


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


async def test_a_slow_handshake_is_waited_for(router: Router) -> None:
    async with served(router, tls=tls("prefill"), roles=("router",)) as listener:
        host, _, port = listener.address.rpartition(":")

        # Without the minimum, this backoff would be the time limit of a handshake.
        slow_s = int(dict(CLIENT_OPTIONS)["grpc.max_reconnect_backoff_ms"]) / 1e3 + 0.05

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(slow_s)
            inner, outer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(pump(reader, outer), pump(inner, writer), return_exceptions=True)

        async with await asyncio.start_server(slow, "127.0.0.1", 0) as line:
            line_port = line.sockets[0].getsockname()[1]
            await ask(kv_channel(f"127.0.0.1:{line_port}", tls("router")))
    assert len(router.callers) == 1


async def test_without_roles_clients_need_no_certificate(router: Router) -> None:
    credentials = grpc.ssl_channel_credentials((fleet() / "ca.crt").read_bytes())
    async with served(router, tls=tls("router")) as listener:
        port = listener.address.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost"):
            await ask(grpc.aio.secure_channel(f"{host}:{port}", credentials))
    assert router.callers == [(None, "", frozenset())] * 2


def half_written(files: Path) -> None:
    (files / "prefill.key").write_bytes((fleet("theirs") / "prefill.key").read_bytes())


def gone(files: Path) -> None:
    (files / "ca.crt").unlink()


def of_another_process(files: Path) -> None:
    copied(files, "decode")
    (files / "decode.crt").replace(files / "prefill.crt")
    (files / "decode.key").replace(files / "prefill.key")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (half_written, "tls_key: .* is not the key of"),
        (gone, "tls_ca: .* can't be read"),
        (of_another_process, "tls_cert: is that of 'baton://decode/decode', this process is 'baton://prefill/prefill'"),
    ],
)
async def test_new_files_that_are_no_good_change_nothing(
    damage: Any, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router()
    files = copied(tmp_path / "files", "prefill")
    mine = tls("prefill", files)
    async with served(router, tls=mine, roles=("router",)) as listener:
        damage(files)
        with caplog.at_level(logging.ERROR, "baton.rpc.tls"):
            for _ in range(3):
                await ask(kv_channel(listener.address, tls("router")))
        assert len(caplog.records) == 1
        assert mine.generation == 0
        copied(files, "prefill", source=fleet("theirs"))
        await ask(kv_channel(listener.address, tls("router", fleet("theirs"))))
        assert mine.generation == 1
    assert re.search(words, caplog.text)
    assert len(router.callers) == 4


async def test_calls_over_the_limit_wait_until_their_deadline_or_their_turn(router: Router) -> None:
    router.hang = True
    async with served(router, streams=2) as listener, control_channel(listener.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        # The limit reaches the client with the connection.
        await stub.Tokenize(pb.TokenizeRequest(text="x"))
        streams = [stub.Generate(pb.GenerateRequest(text="x")) for _ in range(2)]
        await asyncio.gather(*(stream.initial_metadata() for stream in streams))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest(text="x"), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        third = stub.Tokenize(pb.TokenizeRequest(text="x"), timeout=WAIT_S)
        streams[0].cancel()
        await third
        streams[1].cancel()
