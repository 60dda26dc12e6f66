"""Certificates for tests: two fleets that do not trust each other, made once in a process."""

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from baton.cli.certs import issue, make_all
from baton.rpc.tls import Tls

SECRET = "a secret of the tests"


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="baton-certificates-")


@functools.cache
def fleet(name: str = "ours") -> Path:
    """The directory of a fleet's CA, certificates and keys; nobody writes there."""
    directory = Path(_folder().name, name)
    make_all(directory)
    for name in ("decode-1", "decode-2"):
        issue(directory, "decode", name)
    issue(directory, "client", "client")
    return directory


def settings(directory: Path, name: str) -> dict[str, Any]:
    return {
        "tls_cert": str(directory / f"{name}.crt"),
        "tls_key": str(directory / f"{name}.key"),
        "tls_ca": str(directory / "ca.crt"),
    }


def worker(directory: Path, name: str) -> dict[str, Any]:
    """The settings of a worker that wants the tickets of our fleet's routers."""
    return {**settings(directory, name), "ticket_keys": str(fleet() / "ticket.pub")}


def router(directory: Path, name: str = "router") -> dict[str, Any]:
    """The settings of a router that signs tickets as our fleet does."""
    return {**settings(directory, name), "ticket_key": str(fleet() / "ticket.key"), "fleet_secret": SECRET}


def tls(name: str, directory: Path | None = None) -> Tls:
    """The TLS of a process of `directory`, by default of our fleet."""
    files = settings(directory or fleet(), name)
    return Tls(files["tls_cert"], files["tls_key"], files["tls_ca"])


def copied(directory: Path, *names: str, source: Path | None = None) -> Path:
    """`directory`, with the CA and the named certificates of `source` moved into place."""
    directory.mkdir(exist_ok=True)
    for file in ["ca.crt", *(f"{name}.{kind}" for name in names for kind in ("crt", "key"))]:
        shutil.copyfile((source or fleet()) / file, directory / "beside")
        (directory / "beside").replace(directory / file)
    return directory
