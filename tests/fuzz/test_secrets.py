"""Tickets and key files: nothing forged, altered or replayed is accepted, and nothing crashes on what is malformed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from baton import keys
from baton.errors import ConfigError, PermissionDenied
from baton.pb import kv_pb2
from baton.transfer.tickets import DOMAIN, TicketSigner, TicketVerifier
from tests.effort import fuzz
from tests.fuzz.mutation import arbitrary, mutated

NOW = 1_000_000.0
ASKED = {"transfer_id": "t-1", "incarnation": "i-1", "consumer": "decode-1"}
BOX = (0, 0, 0, 0, 0, 0)


class Office:
    """A router's key, a worker that trusts it, and somebody else's key."""

    def __init__(self, folder: Path) -> None:
        self.signer, public = self._made(folder, "router")
        self.forger, _ = self._made(folder, "forger")
        self.public, self.now = public, NOW

    def _made(self, folder: Path, name: str) -> tuple[TicketSigner, Path]:
        key = Ed25519PrivateKey.generate()
        private, public = folder / f"{name}.key", folder / f"{name}.pub"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        return TicketSigner(str(private)), public

    def verifier(self) -> TicketVerifier:
        return TicketVerifier(str(self.public), clock=lambda: self.now)


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office(tmp_path_factory.mktemp("keys"))


def accepted(verifier: TicketVerifier, raw: bytes, asked: dict[str, str]) -> kv_pb2.Ticket | None:
    try:
        return verifier.check(raw, **asked)
    except PermissionDenied:
        return None


@fuzz("tickets: altered", 1500)
def test_an_altered_ticket_says_the_same_or_is_refused(rng: random.Random, office: Office) -> None:
    verifier = office.verifier()
    raw = office.signer.sign(**ASKED, expires_unix_s=NOW + 60)
    ticket = accepted(verifier, raw, ASKED)
    assert ticket is not None
    verifier.redeem(ticket, BOX, 0)
    for altered in (mutated(rng, raw), _resigned(rng, raw, office), arbitrary(rng)):
        found = accepted(verifier, altered, ASKED)
        assert found is None or found == ticket
        if found is not None:
            # Other bytes around the same signed ticket are no second ticket.
            with pytest.raises(PermissionDenied, match="used before"):
                verifier.redeem(found, BOX, 0)


def _resigned(rng: random.Random, raw: bytes, office: Office) -> bytes:
    """Parts of a good ticket with parts of one that somebody else signed, or of one for something else."""
    good = kv_pb2.SignedTicket.FromString(raw)
    asked = ASKED | {rng.choice(list(ASKED)): "another"}
    signer = rng.choice((office.forger, office.signer))
    other = kv_pb2.SignedTicket.FromString(signer.sign(**asked, expires_unix_s=NOW + 600))
    parts: dict[str, Any] = {
        name: getattr(rng.choice((good, other)), name) for name in ("ticket", "signature", "key_id")
    }
    if rng.random() < 0.2:
        parts["ticket"] = DOMAIN + parts["ticket"]
    if rng.random() < 0.2:
        parts["signature"] = parts["signature"] + parts["signature"]
    return kv_pb2.SignedTicket(**parts).SerializeToString()


@fuzz("key files", 1500)
def test_a_key_file_is_sound_or_refused_by_name(rng: random.Random) -> None:
    entries = [
        {"sha256": rng.randbytes(32).hex(), "tenant": rng.choice(("acme", "b.c-d_e")), "admin": rng.random() < 0.5}
        for _ in range(rng.randrange(3))
    ]
    sound = json.dumps({"keys": entries}).encode()
    document: Any = {"keys": entries}
    for _ in range(rng.randrange(3)):
        _spoil(rng, document)
    for data in (mutated(rng, sound), arbitrary(rng), json.dumps(document).encode()):
        try:
            found = keys.parse(data)
        except ConfigError:
            continue
        for entry in found:
            assert len(entry.sha256) == 32
            assert entry.tenant
            assert entry.max_streams is None or entry.max_streams >= 1
            assert isinstance(entry.admin, bool)
    deep = b"[" * rng.randrange(1, 200_000)
    with pytest.raises(ConfigError):
        keys.parse(deep)


def _spoil(rng: random.Random, document: dict[str, Any]) -> None:
    senseless: list[Any] = [None, True, -1, 0, 1.5, 10**400, "", "x" * 300, "a\0b", [], {}, {"keys": []}, float("nan")]
    where = rng.choice([document, *document["keys"]]) if isinstance(document.get("keys"), list) else document
    if isinstance(where, dict):
        where[rng.choice(["keys", "sha256", "tenant", "max_streams", "admin", "more"])] = rng.choice(senseless)
