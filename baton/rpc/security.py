"""A client's TLS settings as credentials and channel options."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TypedDict

import grpc

from baton.errors import ConfigError
from baton.rpc.channel import CLIENT_OPTIONS, Options

File = str | PathLike[str]

_OPTIONS: Options = [
    *CLIENT_OPTIONS,
    # A client's connection is its own: several clients of a process reach several routers on one port.
    ("grpc.use_local_subchannel_pool", 1),
]


class Security(TypedDict, total=False):
    """TLS settings of a client; without any, the connection is not encrypted."""

    tls: bool
    ca: File | None
    cert: File | None
    key: File | None
    server_name: str | None


def client_credentials(
    *,
    tls: bool = False,
    ca: File | None = None,
    cert: File | None = None,
    key: File | None = None,
    server_name: str | None = None,
) -> tuple[grpc.ChannelCredentials | None, Options]:
    """Credentials (None for a channel without TLS), and the channel's options.

    Raises ConfigError naming the setting that is missing or whose file can't be used.
    """
    given = {"ca": ca, "cert": cert, "key": key}
    if (cert is None) != (key is None):
        raise ConfigError(f"{'cert' if cert is None else 'key'}: is missing, cert and key go together")
    if not tls and server_name is None and all(file is None for file in given.values()):
        return None, _OPTIONS
    contents = {name: None if file is None else _read(name, Path(file)) for name, file in given.items()}
    _check_pair(contents["cert"], contents["key"], key)
    credentials = grpc.ssl_channel_credentials(contents["ca"], contents["key"], contents["cert"])
    if server_name is None:
        return credentials, _OPTIONS
    return credentials, [*_OPTIONS, ("grpc.ssl_target_name_override", server_name)]


def _read(name: str, file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {str(file)!r} can't be read: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        # gRPC would only say, at the first call, that no connection could be made.
        raise ConfigError(f"{name}: {str(file)!r} is not a PEM file")
    return data


def _check_pair(cert: bytes | None, key: bytes | None, path: File | None) -> None:
    """Raise ConfigError if certificate and key do not match; gRPC would report this only at the first call, and
    unclearly.
    """
    if cert is None or key is None:
        return
    # Imported only if there is a certificate, because it is slow to import.
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        chain = x509.load_pem_x509_certificates(cert)
    except ValueError as error:
        raise ConfigError(f"cert: holds no PEM certificate: {error}") from None
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"key: {str(path)!r} holds no unencrypted PEM private key: {error}") from None
    if chain[0].public_key() != private.public_key():
        raise ConfigError(f"key: {str(path)!r} is not the key of the certificate")
