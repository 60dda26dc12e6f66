"""Certificates for tests: two fleets that do not trust each other, made once in a process."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from baton.cli.certs import issue, make_all
from baton.rpc.tls import Tls

_TEMPORARY = tempfile.TemporaryDirectory(prefix="baton-certificates-")


@functools.cache
def fleet(name: str = "ours") -> Path:
    """The directory of a fleet's CA, certificates and keys; nobody writes there."""
    directory = Path(_TEMPORARY.name, name)
    make_all(directory)
    issue(directory, "decode", "decode-1")
    issue(directory, "client", "client")
    return directory


def settings(directory: Path, name: str) -> dict[str, Any]:
    """The TLS settings of a process."""
    return {
        "tls_cert": str(directory / f"{name}.crt"),
        "tls_key": str(directory / f"{name}.key"),
        "tls_ca": str(directory / "ca.crt"),
    }


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
