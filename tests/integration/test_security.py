"""Refused callers and their statuses, over real TLS: clients without a key, thieves of tickets, other CAs."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import PermissionDenied, TicketRefused
from baton.pb import admin_pb2, decode_pb2, inference_pb2, kv_pb2, prefill_pb2, worker_pb2
from baton.request import RemoteExport
from baton.rpc.channel import control_channel, kv_channel
from baton.rpc.server import listen
from baton.rpc.tls import principal_of
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import fetch_from
from baton.transfer.tickets import LEEWAY_S, TicketSigner, TicketVerifier
from baton.transfer.transport import SERVICE as KV_SERVICE
from baton.transfer.transport import GrpcSource, KvServicer
from baton.worker.start import KV_ROLES
from tests import certificates
from tests.integration.secure_fleet import SecureFleet, client_channel, secure_fleet
from tests.unit.transfer.support import INCARNATION, WHOLE, Engine, contents, faults, handoff, prefilled, ready, whole

TOKENS = 40
CONSUMER = principal_of("decode", "decode-1")
Status = grpc.StatusCode


@dataclass
class Exporter:
    """A worker's kv listener with TLS and tickets, and an export of it that is ready to be fetched."""

    address: str
    exports: ExportRegistry
    ends: list[str]

    def ticket(self, signer: Path | None = None, *, lasts: float = 60.0, **changes: str) -> bytes:
        """A router's ticket for the export, or one that somebody made."""
        made_out = {"transfer_id": "t", "incarnation": INCARNATION, "consumer": CONSUMER, **changes}
        signing = TicketSigner(str((signer or certificates.fleet()) / "ticket.key"))
        return signing.sign(**made_out, expires_unix_s=time.time() + lasts)

    async def call(self, method: str, name: str = "decode-1", **fields: Any) -> list[Any]:
        """All answers to a call of Kv with the certificate `name`, which says whom the ticket was made out to."""
        kind = getattr(kv_pb2, f"{method}Request")
        request = kind(**{"transfer_id": "t", "incarnation": INCARNATION, "consumer": CONSUMER, **fields})
        async with kv_channel(self.address, certificates.tls(name)) as channel:
            call = channel.unary_stream(f"/{KV_SERVICE}/{method}", request_serializer=kind.SerializeToString)
            return [answer async for answer in call(request, timeout=60)]


@asynccontextmanager
async def exporting() -> AsyncIterator[Exporter]:
    engine = Engine()
    exports = ExportRegistry(engine, INCARNATION, unknown_wait_s=0.05)
    servicer = KvServicer(exports, TicketVerifier(str(certificates.fleet() / "ticket.pub")))
    listener = listen(
        "127.0.0.1:0",
        insecure=False,
        add=servicer.add_to_server,
        services=[KV_SERVICE],
        grace=0.0,
        tls=certificates.tls("prefill"),
        roles=KV_ROLES,
    )
    async with listener as bound:
        _, ends = ready(exports, engine, "t", TOKENS)
        try:
            yield Exporter(bound.address, exports, ends)
        finally:
            exports.close()
            await exports.wait_closed()
    assert engine.stats().used == 0


async def refused(calling: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calling
    return caught.value


async def pull(exporter: Exporter, ticket: bytes) -> None:
    """Fetch the export as the decode worker that its ticket was made out to, and compare what came."""
    engine = Engine()
    handle = engine.reserve("decode", TOKENS)
    async with kv_channel(exporter.address, certificates.tls("decode-1")) as channel:
        export = RemoteExport("t", INCARNATION, (WHOLE,), ticket)
        source = GrpcSource(channel, export, WHOLE, timeout_s=10, silence_timeout_s=10, consumer=CONSUMER)
        fetched = await fetch_from([source], engine, handle, whole(TOKENS), length=TOKENS, timeout_s=10)
    assert fetched == handoff(TOKENS)
    expected = Engine()
    kv_slice = whole(TOKENS)
    assert contents(engine, handle, kv_slice) == contents(expected, prefilled(expected, TOKENS), kv_slice)


Attack = Callable[[Exporter], dict[str, Any]]
ATTACKS: dict[str, tuple[Attack, str]] = {
    "no ticket": (lambda e: {}, "is missing"),
    "no ticket's bytes": (lambda e: {"ticket": b"\xff" * 90}, "is malformed"),
    "expired": (lambda e: {"ticket": e.ticket(lasts=-LEEWAY_S - 1)}, "expired 6"),
    "forged": (lambda e: {"ticket": e.ticket(certificates.fleet("theirs"))}, "unknown key"),
    "for another transfer": (lambda e: {"ticket": e.ticket(transfer_id="u")}, "another transfer_id"),
    "for another incarnation": (lambda e: {"ticket": e.ticket(incarnation="0")}, "another incarnation"),
    "stolen by a worker": (lambda e: {"ticket": e.ticket(), "name": "decode-2"}, "another consumer than the call"),
    "stolen by a worker that says so": (
        lambda e: {"ticket": e.ticket(), "name": "decode-2", "consumer": principal_of("decode", "decode-2")},
        "another consumer",
    ),
    "stolen by a client": (lambda e: {"ticket": e.ticket(), "name": "client"}, "not of decode or prefill"),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("method", ["FetchKv", "ReleaseKv"])
async def test_a_stolen_transfer_id_fetches_and_releases_nothing(attack: str, method: str) -> None:
    fields, problem = ATTACKS[attack]
    async with exporting() as exporter:
        error = await refused(exporter.call(method, **fields(exporter)))
        assert error.code() is Status.PERMISSION_DENIED
        assert problem in (error.details() or "")
        assert exporter.ends == []
        await pull(exporter, exporter.ticket())
        assert exporter.ends == ["t"]


async def test_a_caller_without_a_ticket_does_not_learn_whether_a_transfer_exists() -> None:
    async with exporting() as exporter:
        answers = set()
        for transfer_id in ("t", "unknown"):
            for method in ("FetchKv", "ReleaseKv"):
                error = await refused(exporter.call(method, transfer_id=transfer_id))
                answers.add((error.code(), error.details()))
        assert answers == {(Status.PERMISSION_DENIED, "ticket: is missing")}


async def test_a_ticket_is_no_use_a_second_time() -> None:
    """While the export lives, and when it is over; a retry that is counted up is another use."""
    async with exporting() as exporter:
        ticket = exporter.ticket()
        frames = await exporter.call("FetchKv", ticket=ticket)
        assert (await refused(exporter.call("FetchKv", ticket=ticket))).code() is Status.PERMISSION_DENIED
        assert await exporter.call("FetchKv", ticket=ticket, retry=1) == frames
        for _ in range(2):
            await exporter.call("ReleaseKv", ticket=ticket)
        assert exporter.ends == ["t"]
        error = await refused(exporter.call("FetchKv", ticket=ticket))
        assert error.code() is Status.PERMISSION_DENIED
        assert "was used before for retry 0 of the same slice" in (error.details() or "")


async def test_a_consumer_whose_ticket_is_refused_says_so() -> None:
    async with exporting() as exporter:
        before = faults("ticket_refused")
        with pytest.raises(TicketRefused, match=r"ticket: expired .* \(PERMISSION_DENIED\)$"):
            await pull(exporter, exporter.ticket(lasts=-60))
        assert faults("ticket_refused") == before + 1


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[SecureFleet]:
    async with secure_fleet(tmp_path) as fleet:
        yield fleet


async def test_every_method_needs_a_key_and_is_refused_before_its_message_is_looked_at(fleet: SecureFleet) -> None:
    services = (inference_pb2.DESCRIPTOR.services_by_name["Inference"], admin_pb2.DESCRIPTOR.services_by_name["Admin"])
    async with client_channel(fleet.app.address) as channel:
        for method in [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]:
            for metadata in ((), (("authorization", "Bearer unknown"),)):
                call = channel.unary_unary(method)(b"\xff no message", metadata=metadata, timeout=60)
                error = await refused(call)
                assert (method, error.code()) == (method, Status.UNAUTHENTICATED)
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_admin_calls_need_an_admins_key(fleet: SecureFleet) -> None:
    async with fleet.client("acme") as client, fleet.client("operator") as operator:
        with pytest.raises(PermissionDenied, match=r"^baton\.v1\.Admin: needs an admin's API key$"):
            await client.ledger(timeout=60)
        assert (await operator.ledger(timeout=60)).role == "router"


async def test_client_certificates_can_be_required_besides_keys(tmp_path: Path) -> None:
    ours = certificates.fleet()
    async with secure_fleet(tmp_path, client_certs=True) as fleet:
        method = f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/GetModel"
        key = (("authorization", f"Bearer {fleet.keys['acme']}"),)
        for own, expected in (
            ((ours, "client"), None),
            ((ours, "decode-1"), Status.PERMISSION_DENIED),
            ((certificates.fleet("theirs"), "client"), Status.UNAVAILABLE),
            (None, Status.UNAVAILABLE),
        ):
            async with client_channel(fleet.app.address, own) as channel:
                call = channel.unary_unary(method)(b"", metadata=key, timeout=60)
                if expected is None:
                    assert await call
                else:
                    assert (await refused(call)).code() is expected
        async with client_channel(fleet.app.address, (ours, "client")) as channel:
            assert (await refused(channel.unary_unary(method)(b"", timeout=60))).code() is Status.UNAUTHENTICATED


async def test_workers_serve_only_the_roles_that_they_work_with(fleet: SecureFleet) -> None:
    """No client and no other worker reaches control, nobody but workers reaches kv, and no worker without a ticket."""
    prefill, decode = fleet.prefill.addresses.control, fleet.decode.addresses.control
    services = [
        (prefill, "prefill", prefill_pb2.DESCRIPTOR.services_by_name["Prefill"]),
        (decode, "decode", decode_pb2.DESCRIPTOR.services_by_name["Decode"]),
        (decode, "decode", worker_pb2.DESCRIPTOR.services_by_name["Worker"]),
        (decode, "decode", admin_pb2.DESCRIPTOR.services_by_name["Admin"]),
    ]
    for address, role, service in services:
        for name in ("client", "decode-2"):
            async with control_channel(address, certificates.tls(name), role) as channel:
                for method in service.methods:
                    call = channel.stream_unary(f"/{service.full_name}/{method.name}")(iter([b""]), timeout=60)
                    assert (await refused(call)).code() is Status.PERMISSION_DENIED
    for address, role in kv_addresses(fleet):
        for name, problem in (("client", "certificate"), ("router", "certificate"), ("decode-2", "ticket: is missing")):
            async with kv_channel(address, certificates.tls(name), role) as channel:
                error = await refused(channel.unary_unary(f"/{KV_SERVICE}/ReleaseKv")(b"", timeout=60))
                assert error.code() is Status.PERMISSION_DENIED
                assert problem in (error.details() or "")


def kv_addresses(fleet: SecureFleet) -> list[tuple[str, str]]:
    return [(fleet.prefill.addresses.kv, "prefill"), (fleet.decode.addresses.kv, "decode")]
