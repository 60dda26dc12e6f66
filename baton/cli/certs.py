"""`baton certs`: CA, certificates and keys of a secure fleet, in one directory.

    ca.crt ca.key                       the fleet's own CA
    router.crt router.key  prefill.…    a certificate for each role (see baton.rpc.tls for the names in it)
    decode.…  mixed.…  admin.…
    ticket.key ticket.pub               routers sign tickets with ticket.key, workers check them with ticket.pub

Keys are on the curve P-256, ticket keys are Ed25519. Only the owner can read files with private keys. A new file is
written under another name and then renamed, so a reader sees either the old one or the new one.

`SecureFleet` has the files that `baton up --secure DIR` keeps in DIR, and the flags by which its services use them:

    as `baton certs` makes them    CA, certificates of router and admin, ticket keys
    prefill-0.… decode-0.… …       a certificate for each worker, so that no other worker can use its tickets
    api_keys.json                  hashes of the API keys that the router accepts
    api.key                        one such key as text; only the owner of the file can read it

Files that exist are used as they are; only missing ones are made.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from baton import keys
from baton.errors import ConfigError
from baton.rpc.tls import ROLES, Tls, certificate_names, principal_of, role_name

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
FLEET_ROLES = ("router", "prefill", "decode", "mixed", "admin")

_CA_DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# So that a machine whose clock is a little behind accepts a new certificate.
_CLOCK_SKEW = datetime.timedelta(hours=1)


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory of the files.")
@click.option(
    "--days",
    type=click.IntRange(1, _CA_DAYS),
    default=365,
    show_default=True,
    help="Days for which certificates are valid.",
)
@click.option("--host", "hosts", multiple=True, help="Name or IP at which clients reach the router; may be repeated.")
@click.option("--role", type=click.Choice(ROLES), help="Make one certificate of this role, with the CA in --out.")
@click.option(
    "--name", default="", help="Name of the process or client that gets the certificate.  [default: the role]"
)
@click.option("--force", is_flag=True, help="Overwrite files.")
def certs(out: Path, days: int, hosts: tuple[str, ...], role: str | None, name: str, force: bool) -> None:
    """Make a CA, certificates for every role, and the ticket keys; or one more certificate."""
    if name and role is None:
        raise click.UsageError("--name needs --role")
    try:
        if role is None:
            made = make_all(out, days=days, hosts=hosts, force=force)
        else:
            made = issue(out, role, name or role, days=days, hosts=hosts, force=force)
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    for path in made:
        click.echo(str(path))


def make_all(out: Path, *, days: int = 365, hosts: Sequence[str] = (), force: bool = False) -> list[Path]:
    """Make all files in `out`; returns them in the order in which they were written.

    Raises ConfigError naming a file that exists already, unless `force`.
    """
    stems = ("ca", *FLEET_ROLES)
    files = [out / f"{stem}.{kind}" for stem in stems for kind in ("key", "crt")]
    more = ", and makes a new CA; to make one certificate anew, for example for another --host, give its --role"
    _refuse_existing([*files, out / "ticket.key", out / "ticket.pub"], force, more)
    names = _checked_hosts(hosts)
    _make_directory(out)
    _make_ca(out)
    for role in FLEET_ROLES:
        _issue(out, role, role, days, names)
    make_ticket_keys(out)
    return [*files, out / "ticket.key", out / "ticket.pub"]


def issue(
    out: Path, role: str, name: str, *, days: int = 365, hosts: Sequence[str] = (), force: bool = False
) -> list[Path]:
    """Make `out`/NAME.key and NAME.crt with the CA in `out`.

    Raises ConfigError for a bad name, a missing CA, and, unless `force`, a file that exists already.
    """
    if not _NAME.fullmatch(name) or name in ("ca", "ticket"):
        raise ConfigError(f"--name: must have only letters, digits and ._-, and not be ca or ticket, got {name!r}")
    files = [out / f"{name}.key", out / f"{name}.crt"]
    _refuse_existing(files, force)
    _issue(out, role, name, days, _checked_hosts(hosts))
    return files


def _refuse_existing(files: Sequence[Path], force: bool, more: str = "") -> None:
    if not force and (there := [str(file) for file in files if file.exists()]):
        raise ConfigError(f"{', '.join(there)} would be overwritten; --force allows that{more}")


def _checked_hosts(hosts: Sequence[str]) -> list[x509.GeneralName]:
    from cryptography import x509

    names: list[x509.GeneralName] = []
    for host in dict.fromkeys((*LOCAL_HOSTS, *hosts)):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not re.fullmatch(r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)(\.[A-Za-z0-9_-]+)*", host):
                raise ConfigError(f"--host: must be a name or an IP address without port, got {host!r}") from None
            if host in map(role_name, ROLES):
                raise ConfigError(f"--host: {host!r} is the name of a role, not of a host") from None
            names.append(x509.DNSName(host))
    return names


def _make_ca(out: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    # Two CAs with the same name could not be told apart in messages.
    name = _named(f"Baton CA {x509.random_serial_number() >> 128:08x}")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = _builder(name, name, key.public_key(), _CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    _write_pair(out, "ca", key, _signed(builder, key))


def _issue(out: Path, role: str, name: str, days: int, hosts: Sequence[x509.GeneralName]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    ca, ca_key = _read_ca(out)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [
        *map(x509.DNSName, certificate_names(role)),
        x509.UniformResourceIdentifier(principal_of(role, name)),
        *(hosts if role == "router" else ()),
    ]
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(_named(name), ca.subject, key.public_key(), days)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(digital_signature=True), True),
        (x509.ExtendedKeyUsage(uses), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    _write_pair(out, name, key, _signed(builder, ca_key))


def _read_ca(out: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        ca = x509.load_pem_x509_certificate((out / "ca.crt").read_bytes())
        key = load_pem_private_key((out / "ca.key").read_bytes(), None)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} can't be read: {error.strerror}; baton certs without --role makes it"
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{out / 'ca.crt'} and ca.key are not a certificate and its key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{out / 'ca.key'} is not a key on an elliptic curve")
    return ca, key


def make_ticket_keys(out: Path) -> None:
    """Make `out`/ticket.key and ticket.pub; raises ConfigError."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_private(out / "ticket.key", _pem(key))
    _write(out / "ticket.pub", public, 0o644)


def _named(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(**uses: bool) -> x509.KeyUsage:
    from cryptography import x509

    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign "
        "crl_sign encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: uses.get(name, False) for name in names.split()})


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _CLOCK_SKEW).not_valid_after(now + datetime.timedelta(days=days))


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _write_pair(out: Path, stem: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding

    write_private(out / f"{stem}.key", _pem(key))
    _write(out / f"{stem}.crt", certificate.public_bytes(Encoding.PEM), 0o644)


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem


def _make_directory(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{str(out)!r} can't be made: {error.strerror}") from None


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read; raises ConfigError."""
    _write(path, data, 0o600)


def _write(path: Path, data: bytes, mode: int) -> None:
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.unlink(missing_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} can't be written: {error.strerror}") from None


_TENANT = "default"
_OF_ONE = {"router": "router", "admin": "admin"}
_FIRST = ("ca", *FLEET_ROLES, "ticket")
_KINDS = ("crt", "key", "pub")
_ANY_HOST = ("0.0.0.0", "::")


def worker_names(role: str, count: int) -> list[str]:
    """The names of the workers of a role."""
    return [f"{role}-{index}" for index in range(count)]


@dataclass(frozen=True, slots=True)
class SecureFleet:
    """A directory with all files that the fleet needs."""

    directory: Path

    @classmethod
    def prepare(cls, directory: Path, hosts: Sequence[str], workers: Mapping[str, int]) -> Self:
        """Make missing files, for a router at `hosts` and this number of workers of each role. Raises ConfigError."""
        fleet = cls(directory.absolute())
        wanted = {name: role for role, count in workers.items() for name in worker_names(role, count)}
        names = [host for host in hosts if host not in _ANY_HOST]
        if not any(fleet.file(f"{stem}.{kind}").exists() for stem in _FIRST for kind in _KINDS):
            make_all(directory, hosts=names)
        missing = {name: role for name, role in (_OF_ONE | wanted).items() if fleet._is_missing(name, "crt")}
        if missing:
            fleet._check_authority(next(iter(missing)))
        for name, role in missing.items():
            issue(directory, role, name, hosts=names)
        if fleet._is_missing("ticket", "pub"):
            make_ticket_keys(directory)
        if not fleet.file("api.key").exists():
            key = keys.add(fleet.file("api_keys.json"), tenant=_TENANT, admin=True)
            write_private(fleet.file("api.key"), f"{key}\n".encode())
        return fleet

    def file(self, name: str) -> Path:
        """The path of a file."""
        return self.directory / name

    def worker_flags(self, name: str) -> list[str]:
        """Flags for the TLS of a worker, and for the tickets that it accepts."""
        return [*self._tls_flags(name), f"--ticket-keys={self.file('ticket.pub')}"]

    def router_flags(self) -> list[str]:
        """Flags for the TLS of the router, its ticket key, and the API keys that it accepts."""
        own = [f"--ticket-key={self.file('ticket.key')}", f"--api-keys={self.file('api_keys.json')}"]
        return [*self._tls_flags("router"), *own]

    def admin(self) -> Tls:
        """TLS for the process that supervises the fleet."""
        return Tls(*(str(self.file(name)) for name in ("admin.crt", "admin.key", "ca.crt")))

    def _is_missing(self, stem: str, public: str) -> bool:
        """Whether neither file of a pair exists; raises ConfigError if only one exists."""
        there = [self.file(f"{stem}.{kind}") for kind in (public, "key") if self.file(f"{stem}.{kind}").exists()]
        if len(there) == 1:
            raise ConfigError(
                f"{there[0]} exists, but the other file of its pair does not: remove it, and both are made"
            )
        return not there

    def _check_authority(self, missing: str) -> None:
        if absent := [name for name in ("ca.crt", "ca.key") if not self.file(name).exists()]:
            raise ConfigError(
                f"{self.directory} has no {missing}.crt and, to make it, no {' or '.join(absent)}: "
                "add the missing files, or give --secure a directory that is new or empty"
            )

    def describe(self) -> str:
        """Files that clients need, for the ready line."""
        return f" ca={self.file('ca.crt')} api_key_file={self.file('api.key')}"

    def _tls_flags(self, name: str) -> list[str]:
        files = {"cert": f"{name}.crt", "key": f"{name}.key", "ca": "ca.crt"}
        return [f"--tls-{setting}={self.file(file)}" for setting, file in files.items()]
