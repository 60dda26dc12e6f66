"""Files that `baton up --secure DIR` keeps in DIR, and the flags by which its services use them.

    as `baton certs` makes them    CA, certificates of router and admin, ticket keys
    prefill-0.… decode-0.… …       a certificate for each worker, so that a ticket for one serves no other
    api_keys.json                  hashes of the API keys that the router accepts
    api.key                        one such key, in the clear, for its owner only

Files that exist are used as they are; only missing ones are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from baton import keys
from baton.cli.certs import FLEET_ROLES, issue, make_all, make_ticket_keys, write_private
from baton.errors import ConfigError
from baton.rpc.tls import Tls

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
