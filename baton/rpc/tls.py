"""Mutual TLS between processes: certificate files that are read again when they change, and the identity of the peer.

A process has one certificate, its key, and the CA that it trusts (`tls_cert`, `tls_key`, `tls_ca`). The
names in a certificate identify its holder:

    DNS   router.baton | prefill.baton | decode.baton | mixed.baton | admin.baton | client.baton     its role
    URI   baton://decode/decode-1                                                                    its principal

The certificate of a mixed worker also names prefill.baton and decode.baton, because its peers fetch from it as from
those.

Addresses of workers change, so a dialling process checks the role of the peer and not its host. A listener checks the
role of the caller (`peer_roles`). Tickets for one process are bound to its principal (`peer_principal`).

A `Tls` checks its files before every handshake of a listener and before every dial. New contents are a new
generation: later handshakes use it, existing connections are not touched. Contents that can't be used, such as
a new certificate whose key has not been written yet, are logged once, and the old contents stay in use.
"""

from __future__ import annotations

import datetime
import os
import ssl
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from baton.config.watched import WatchedFiles
from baton.errors import ConfigError, PermissionDenied

SETTINGS = ("tls_cert", "tls_key", "tls_ca")
ROLES = ("router", "prefill", "decode", "mixed", "admin", "client")

_DOMAIN = ".baton"
_SCHEME = "baton://"


class TlsSettings(Protocol):
    """The TLS settings of a configuration; all three are empty without TLS."""

    @property
    def tls_cert(self) -> str:
        """PEM file with the certificate, and the intermediate certificates up to the CA."""

    @property
    def tls_key(self) -> str:
        """PEM file with the private key of the certificate."""

    @property
    def tls_ca(self) -> str:
        """PEM file with the certificates of the trusted CAs."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Matching contents of the three files in PEM, and the principal in the certificate."""

    cert: bytes
    key: bytes
    ca: bytes
    principal: str


def role_name(role: str) -> str:
    """The DNS name of a role in certificates."""
    return role + _DOMAIN


def certificate_names(role: str) -> list[str]:
    """The DNS names of roles in the certificate of a process of `role`."""
    return [role_name(each) for each in ((role, "prefill", "decode") if role == "mixed" else (role,))]


def principal_of(role: str, name: str) -> str:
    """The URI name of one process in its certificate."""
    return f"{_SCHEME}{role}/{name}"


class Tls:
    """The certificate, key and CA of this process; may be used from any thread."""

    def __init__(self, cert: str, key: str, ca: str, role: str = "") -> None:
        """If `role` is given, the certificate must contain it."""
        self._role = role
        self._paths = dict(zip(SETTINGS, (cert, key, ca), strict=True))
        self._lock = threading.Lock()
        self.principal = ""
        """Name of this process in its own certificate: its URI name, else the DNS name of its role, else empty."""
        self._files = WatchedFiles(self._paths, self._check)
        self._identity = self._files.value()
        self._generation = 0
        self.principal = self._identity.principal

    @classmethod
    def load(cls, settings: TlsSettings, role: str) -> Tls | None:
        """The `Tls` for the settings of a process of `role`; None if they are empty.

        Raises ConfigError naming a setting that is missing, unreadable, does not match the others, or belongs to
        another role.
        """
        given = {name: getattr(settings, name) for name in SETTINGS}
        if not any(given.values()):
            return None
        for name, path in given.items():
            if not path:
                raise ConfigError(f"{name}: is missing, but {', '.join(n for n in given if given[n])} is given")
        return cls(given["tls_cert"], given["tls_key"], given["tls_ca"], role)

    @property
    def generation(self) -> int:
        """Number that grows when the files' contents change. Only credentials of the latest one may be used to dial."""
        return self.identity()[0]

    def identity(self) -> tuple[int, Identity]:
        """The generation and contents to use now."""
        with self._lock:
            newest = self._files.value()
            if newest != self._identity:
                self._identity = newest
                self._generation += 1
            return self._generation, newest

    def server_credentials(self, *, require_client: bool) -> grpc.ServerCredentials:
        """Credentials of a listener, up to date at every handshake.

        With `require_client` a peer without a certificate of the CA is refused; otherwise no certificate is requested.
        """
        served, identity = self.identity()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            now, newest = self.identity()
            if now == served:
                return None
            served = now
            return _server_configuration(newest)

        return grpc.dynamic_ssl_server_credentials(_server_configuration(identity), fetch, require_client)

    def ssl_context(self, *, require_client: bool) -> ssl.SSLContext:
        """The context of an HTTP listener, up to date at every handshake, as `server_credentials`."""
        served, identity = self.identity()
        first = current = _ssl_context(identity, require_client=require_client)

        def renew(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            nonlocal served, current
            now, newest = self.identity()
            if now != served:
                served, current = now, _ssl_context(newest, require_client=require_client)
            connection.context = current

        # It is called in every handshake, also if the client names no host.
        first.sni_callback = renew
        return first

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for one dial. They never change, so every dial must get new ones."""
        _, identity = self.identity()
        return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.cert)

    def _check(self, cert: bytes, key: bytes, ca: bytes) -> Identity:
        names = _check_files(cert, key, ca, self._paths)
        needed = certificate_names(self._role) if self._role else []
        if missing := [name for name in needed if name not in names]:
            raise ConfigError(
                f"tls_cert: {self._paths['tls_cert']!r} must name {' and '.join(missing)}, "
                f"it names {', '.join(names) or 'nothing'}"
            )
        principal = _principal(names)
        if self.principal and principal != self.principal:
            raise ConfigError(f"tls_cert: is that of {principal!r}, this process is {self.principal!r}")
        return Identity(cert, key, ca, principal)


def _ssl_context(identity: Identity, *, require_client: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The ssl module reads certificates and keys from files only.
    file = os.memfd_create("certificate")
    try:
        os.write(file, identity.cert + b"\n" + identity.key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    if require_client:
        context.load_verify_locations(cadata=identity.ca.decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def certificate_roles(certificate: bytes | None) -> frozenset[str]:
    """Roles in a verified certificate in DER; none without one."""
    if certificate is None:
        return frozenset()
    from cryptography import x509

    try:
        names = x509.load_der_x509_certificate(certificate).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except (ValueError, x509.ExtensionNotFound):
        return frozenset()
    seen = names.value.get_values_for_type(x509.DNSName)
    return frozenset(role for role in ROLES if role_name(role) in seen)


def _server_configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.ca)


def _check_files(cert: bytes, key: bytes, ca: bytes, paths: dict[str, str]) -> list[str]:
    """URI and DNS names in the certificate.

    Raises ConfigError naming the setting whose contents are not PEM, or do not match.
    """
    # Import this only where TLS is used: it is slow to load.
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    def parse(name: str, data: bytes, parser: Callable[[bytes], Any], what: str) -> Any:
        try:
            return parser(data)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{name}: {paths[name]!r} holds no {what}: {error}") from None

    chain = parse("tls_cert", cert, x509.load_pem_x509_certificates, "PEM certificate")
    private = parse("tls_key", key, lambda data: load_pem_private_key(data, None), "unencrypted PEM private key")
    authorities = parse("tls_ca", ca, x509.load_pem_x509_certificates, "PEM certificate")
    if chain[0].not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"tls_cert: {paths['tls_cert']!r} expired at {chain[0].not_valid_after_utc}")
    if chain[0].public_key() != private.public_key():
        raise ConfigError(f"tls_key: {paths['tls_key']!r} is not the key of {paths['tls_cert']!r}")
    if not any(_is_signed_by(chain[-1], authority) for authority in authorities):
        raise ConfigError(f"tls_ca: {paths['tls_ca']!r} does not hold the CA that signed {paths['tls_cert']!r}")
    try:
        names = chain[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return [*uris, *names.get_values_for_type(x509.DNSName)]


def _is_signed_by(certificate: Any, authority: Any) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def peer_roles(context: grpc.aio.ServicerContext) -> frozenset[str]:
    """Roles in the verified certificate of the caller; none without a certificate."""
    names = _peer_names(context)
    return frozenset(role for role in ROLES if role_name(role) in names)


def peer_principal(context: grpc.aio.ServicerContext) -> str:
    """Principal in the verified certificate of the caller; empty without a certificate."""
    return _principal(_peer_names(context))


def admit(context: grpc.aio.ServicerContext, roles: Collection[str]) -> None:
    """Raise PermissionDenied unless the caller has a certificate of one of `roles`."""
    seen = peer_roles(context)
    if not seen.intersection(roles):
        names = " and ".join(sorted(seen)) or "no role"
        raise PermissionDenied(f"the caller's certificate is that of {names}, not of {' or '.join(roles)}")


def _peer_names(context: grpc.aio.ServicerContext) -> list[str]:
    auth = context.auth_context()
    return [name.decode() for kind in ("peer_uri", "peer_dns") for name in auth.get(kind, ())]


def _principal(names: Collection[str]) -> str:
    uris = [name for name in names if name.startswith(_SCHEME)]
    roles = [name for name in names if name in map(role_name, ROLES)]
    return next(iter([*uris, *roles]), "")
