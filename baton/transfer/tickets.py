"""Tickets: a router's signed permission for one worker to fetch one export until the request's deadline.

    router     TicketSigner (Ed25519 private key) ── sign ──▶ Start.ticket ──▶ decode ──▶ FetchKvRequest.ticket
    exporter   TicketVerifier (public keys)       ── check: consumer, export, expiry ── redeem: not used before

The signature covers DOMAIN followed by the serialized Ticket, so that another message signed with the same key can't be
used as a ticket. An exporter checks the ticket before it looks anything up: a caller without a valid ticket does not
even learn whether a transfer exists.

A ticket contains the name of its consumer. On a kv listener with TLS, the certificate of the peer must have the same
name, so a stolen ticket is of no use. Without TLS the ticket can only be compared with the name in the request. In
addition, each (ticket, slice, retry) is accepted once. The verifier remembers the last MAX_USES uses, so their memory
is bounded; older exports have ended long ago. An exporter that restarts forgets all uses, but old tickets are not valid
for its new incarnation.

The clocks of router and exporter may differ by LEEWAY_S.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from baton.config.watched import watch_file
from baton.errors import ConfigError, PermissionDenied, preview
from baton.pb import kv_pb2
from baton.request import MAX_TICKET_BYTES

if TYPE_CHECKING:
    # Imported with the first key: it takes 0.2 s, and many workers have no key.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

DOMAIN = b"baton.v1.Ticket\0"
LEEWAY_S = 5.0
"""Seconds for which a ticket is still accepted after it expired, because clocks may differ."""

MAX_USES = 131_072
"""Number of uses that are remembered, in about 30 MB.

They cover many minutes; an export ends seconds after its prefill.
"""

_KEY_ID_BYTES = 8
_PUBLIC_END = b"-----END PUBLIC KEY-----"

RequestedSlice = tuple[int, int, int, int, int, int]
"""A slice in a request: start and end of tokens, of layers and of heads; an end of 0 means the end of the export."""

Use = tuple[RequestedSlice, int]
"""The slice, and the number of the retry."""


class TicketSigner:
    """Signs with the Ed25519 private key of a PEM file, which is read again when it changes."""

    def __init__(self, path: str) -> None:
        """Read the key. Raises ConfigError, with `ticket_key` and the path, if the file has no Ed25519 private key."""
        self._key = watch_file(path, "ticket_key", _parse_private_key)

    @property
    def key_id(self) -> bytes:
        """Id of the key in use now."""
        return self._key.value()[1]

    def sign(self, *, transfer_id: str, incarnation: str, consumer: str, expires_unix_s: float) -> bytes:
        """Sign a ticket; returns a serialized SignedTicket. `expires_unix_s` is in seconds since the Unix epoch."""
        key, key_id = self._key.value()
        ticket = kv_pb2.Ticket(
            transfer_id=transfer_id,
            incarnation=incarnation,
            consumer=consumer,
            expires_unix_ms=max(int(expires_unix_s * 1000), 0),
        ).SerializeToString(deterministic=True)
        signature = key.sign(DOMAIN + ticket)
        return bytes(kv_pb2.SignedTicket(ticket=ticket, signature=signature, key_id=key_id).SerializeToString())


class TicketVerifier:
    """Verifies with the Ed25519 public keys of a PEM file, read again when it changes; used on one event loop.

    To replace a router's key, add the new public key here, then change the router's key, then remove the old public
    key.
    """

    def __init__(
        self,
        path: str,
        *,
        setting: str = "ticket_keys",
        clock: Callable[[], float] = time.time,
        max_uses: int = MAX_USES,
    ) -> None:
        """Read the keys; `clock` returns Unix time in seconds. Raises ConfigError if the file has no such keys."""
        self._keys = watch_file(path, setting, _parse_public_keys)
        self._clock = clock
        self._max_uses = max_uses
        self._uses: OrderedDict[bytes, None] = OrderedDict()

    def key_ids(self) -> tuple[bytes, ...]:
        """Ids of the keys whose tickets are accepted now."""
        return tuple(self._keys.value())

    def check(self, raw: bytes, *, transfer_id: str, incarnation: str, consumer: str) -> kv_pb2.Ticket:
        """Decode a ticket and check that it is valid for this call; raises PermissionDenied, with the reason."""
        ticket = self._verify(raw)
        asked = {"transfer_id": transfer_id, "incarnation": incarnation, "consumer": consumer}
        for name, value in asked.items():
            if getattr(ticket, name) != value:
                raise PermissionDenied(f"ticket: is for another {name} than the call's, {preview(value)}")
        late = self._clock() - ticket.expires_unix_ms / 1000
        if late > LEEWAY_S:
            raise PermissionDenied(f"ticket: expired {late:.1f} s ago; clocks may differ by {LEEWAY_S:g} s")
        return ticket

    def redeem(self, ticket: kv_pb2.Ticket, kv_slice: RequestedSlice, retry: int) -> None:
        """Accept this use of a checked ticket. Raises PermissionDenied if it was used before."""
        use: Use = (kv_slice, retry)
        name = hashlib.sha256(repr(use).encode() + ticket.SerializeToString(deterministic=True)).digest()
        if name in self._uses:
            raise PermissionDenied(f"ticket: was used before for retry {retry} of the same slice")
        self._uses[name] = None
        if len(self._uses) > self._max_uses:
            self._uses.popitem(last=False)

    def _verify(self, raw: bytes) -> kv_pb2.Ticket:
        if not raw:
            raise PermissionDenied("ticket: is missing")
        if len(raw) > MAX_TICKET_BYTES:
            raise PermissionDenied(f"ticket: has {len(raw)} bytes, {MAX_TICKET_BYTES} are allowed")
        try:
            signed = kv_pb2.SignedTicket.FromString(raw)
        except DecodeError:
            raise PermissionDenied("ticket: is malformed") from None
        key = self._keys.value().get(signed.key_id)
        if key is None:
            named = signed.key_id[:_KEY_ID_BYTES].hex() or "none"
            raise PermissionDenied(f"ticket: is signed with an unknown key, {named}")
        from cryptography.exceptions import InvalidSignature

        try:
            # Ed25519 verification compares no secrets, so its duration reveals nothing.
            key.verify(signed.signature, DOMAIN + signed.ticket)
        except InvalidSignature:
            raise PermissionDenied("ticket: its signature is wrong") from None
        try:
            return kv_pb2.Ticket.FromString(signed.ticket)
        except DecodeError:
            raise PermissionDenied("ticket: is malformed") from None


def _parse_private_key(data: bytes) -> tuple[Ed25519PrivateKey, bytes]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"holds no unencrypted PEM private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError("its private key is not an Ed25519 key")
    return key, _key_id(key.public_key())


def _parse_public_keys(data: bytes) -> Mapping[bytes, Ed25519PublicKey]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    keys = {}
    blocks = data.split(_PUBLIC_END)
    if len(blocks) < 2 or blocks[-1].strip():
        raise ConfigError("must hold PEM public keys and nothing behind them")
    for number, block in enumerate(blocks[:-1]):
        try:
            key = load_pem_public_key(block.strip() + b"\n" + _PUBLIC_END + b"\n")
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"key {number} is not a PEM public key: {error}") from None
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(f"key {number} is not an Ed25519 key")
        keys[_key_id(key)] = key
    return keys


def _key_id(key: Ed25519PublicKey) -> bytes:
    return hashlib.sha256(key.public_bytes_raw()).digest()[:_KEY_ID_BYTES]
