"""Tickets: what is signed, what is refused and why, what is accepted once, and keys that are replaced."""

import logging
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from baton.errors import ConfigError, PermissionDenied
from baton.pb import kv_pb2
from baton.transfer.tickets import DOMAIN, LEEWAY_S, MAX_TICKET_BYTES, RequestedSlice, TicketSigner, TicketVerifier
from tests.clock import Clock

ALL: RequestedSlice = (0, 40, 0, 3, 0, 2)
FOR = {"transfer_id": "t", "incarnation": "first", "consumer": "baton://decode/d"}


class TicketAuthority:
    """A signer, and the verifier of a worker that knows its key."""

    def __init__(self, folder: Path, **options: int) -> None:
        self.folder, self.clock = folder, Clock(1_000_000.0)
        self.private, self.public = folder / "ticket.key", folder / "ticket.pub"
        self.key = write_key(self.private, self.public)
        self.signer = TicketSigner(str(self.private))
        self.verifier = TicketVerifier(str(self.public), clock=self.clock, **options)

    def ticket(self, *, lasts: float = 60.0, **changes: str) -> bytes:
        return self.signer.sign(**{**FOR, **changes}, expires_unix_s=self.clock.now + lasts)

    def check(self, raw: bytes, **changes: str) -> kv_pb2.Ticket:
        return self.verifier.check(raw, **{**FOR, **changes})


@pytest.fixture
def router(tmp_path: Path) -> TicketAuthority:
    return TicketAuthority(tmp_path)


def write_key(private: Path, public: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return key


def test_a_ticket_is_good_for_what_it_was_made_out_for(router: TicketAuthority) -> None:
    ticket = router.check(router.ticket())
    assert (ticket.transfer_id, ticket.incarnation, ticket.consumer) == ("t", "first", "baton://decode/d")
    assert ticket.expires_unix_ms == 1_000_060_000


@pytest.mark.parametrize("name", ["transfer_id", "incarnation", "consumer"])
def test_a_ticket_for_another_is_refused_by_name(router: TicketAuthority, name: str) -> None:
    with pytest.raises(PermissionDenied, match=f"^ticket: is for another {name} than the call's, 'other'$"):
        router.check(router.ticket(), **{name: "other"})


def test_an_expired_ticket_is_refused_after_the_leeway(router: TicketAuthority) -> None:
    raw = router.ticket(lasts=10)
    router.clock.now += 10 + LEEWAY_S
    router.check(raw)
    router.clock.now += 0.5
    with pytest.raises(PermissionDenied, match=r"^ticket: expired 5.5 s ago; clocks may differ by 5 s$"):
        router.check(raw)


def test_malformed_tickets_are_refused(router: TicketAuthority) -> None:
    for raw, problem in ((b"", "is missing"), (b"\xff", "is malformed"), (bytes(MAX_TICKET_BYTES + 1), "has 4097")):
        with pytest.raises(PermissionDenied, match=f"^ticket: {problem}"):
            router.check(raw)


def test_every_flipped_bit_is_noticed(router: TicketAuthority) -> None:
    raw = router.ticket()
    for place in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(PermissionDenied):
            router.check(bytes(flipped))


def test_a_forged_ticket_is_refused(router: TicketAuthority, tmp_path: Path) -> None:
    (tmp_path / "forger").mkdir()
    forger = TicketAuthority(tmp_path / "forger")
    with pytest.raises(PermissionDenied, match=r"^ticket: is signed with an unknown key, [0-9a-f]{16}$"):
        router.check(forger.ticket())
    forged = kv_pb2.SignedTicket.FromString(forger.ticket())
    forged.key_id = kv_pb2.SignedTicket.FromString(router.ticket()).key_id
    with pytest.raises(PermissionDenied, match=r"^ticket: its signature is wrong$"):
        router.check(forged.SerializeToString())


def test_a_signature_of_the_bare_ticket_is_not_one_of_a_ticket(router: TicketAuthority) -> None:
    signed = kv_pb2.SignedTicket.FromString(router.ticket())
    router.key.public_key().verify(signed.signature, DOMAIN + signed.ticket)
    signed.signature = router.key.sign(signed.ticket)
    with pytest.raises(PermissionDenied, match=r"^ticket: its signature is wrong$"):
        router.check(signed.SerializeToString())


def test_each_slice_and_retry_is_accepted_once(router: TicketAuthority) -> None:
    ticket = router.check(router.ticket())
    uses = [(ALL, 0), (ALL, 1), ((0, 8, 0, 3, 0, 2), 0), ((5, 0, 0, 3, 0, 2), 0)]
    for use in uses:
        router.verifier.redeem(ticket, *use)
    for kv_slice, retry in uses:
        with pytest.raises(PermissionDenied, match=f"was used before for retry {retry} of"):
            router.verifier.redeem(router.check(router.ticket()), kv_slice, retry)


def test_uses_are_remembered_for_as_long_as_the_ticket_is_taken(router: TicketAuthority) -> None:
    raw = router.ticket(lasts=10)
    router.verifier.redeem(router.check(raw), ALL, 0)
    router.clock.now += 10 + LEEWAY_S
    with pytest.raises(PermissionDenied, match="was used before"):
        router.verifier.redeem(router.check(raw), ALL, 0)


def test_the_oldest_use_is_forgotten_rather_than_a_new_one_refused(tmp_path: Path) -> None:
    router = TicketAuthority(tmp_path, max_uses=2)
    ticket = router.check(router.ticket(lasts=1e9))
    for retry in range(3):
        router.verifier.redeem(ticket, ALL, retry)
    for retry in (1, 2):
        with pytest.raises(PermissionDenied, match="was used before"):
            router.verifier.redeem(ticket, ALL, retry)
    router.verifier.redeem(ticket, ALL, 0)


def test_keys_are_replaced_while_the_worker_runs(router: TicketAuthority) -> None:
    old, old_key = router.ticket(), router.public.read_bytes()
    write_key(router.private, router.folder / "next.pub")
    replace(router.public, old_key + (router.folder / "next.pub").read_bytes())
    new = router.ticket()
    assert new != old
    ids = router.verifier.key_ids()
    assert len(ids) == 2
    assert ids[1] == router.signer.key_id
    router.check(old)
    router.check(new)
    replace(router.public, (router.folder / "next.pub").read_bytes())
    router.check(new)
    assert router.verifier.key_ids() == ids[1:]
    with pytest.raises(PermissionDenied, match="unknown key"):
        router.check(old)


def test_broken_keys_leave_old_ones_and_are_logged(router: TicketAuthority, caplog: pytest.LogCaptureFixture) -> None:
    raw, good = router.ticket(), router.public.read_bytes()
    for broken in (b"nonsense", good + b"rest"):
        caplog.clear()
        replace(router.public, broken)
        with caplog.at_level(logging.ERROR):
            router.check(raw)
            router.check(raw)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert str(router.public) in caplog.text
    router.public.unlink()
    router.check(raw)


@pytest.mark.parametrize("contents", [None, b"", b"nonsense", "curve"])
def test_unusable_keys_are_refused_by_setting_and_path(tmp_path: Path, contents: bytes | str | None) -> None:
    path = tmp_path / "key.pem"
    curve = ec.generate_private_key(ec.SECP256R1())
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    if contents == "curve":
        path.write_bytes(curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match=r"^ticket_key: '.*/key\.pem'"):
        TicketSigner(str(path))
    if contents == "curve":
        path.write_bytes(curve.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(ConfigError, match=r"^ticket_keys: '.*/key\.pem'"):
        TicketVerifier(str(path))


def replace(path: Path, data: bytes) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    os.replace(beside, path)
