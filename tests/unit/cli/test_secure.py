"""Files that `baton up --secure` makes, and files that it leaves alone."""

from pathlib import Path

import pytest

from baton import keys
from baton.cli.certs import SecureFleet, make_all
from baton.config.roles import load
from baton.config.router import RouterConfig
from baton.config.worker import DecodeConfig
from baton.errors import ConfigError
from baton.rpc.tls import Tls


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_missing_secrets_are_made_and_existing_ones_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    fleet = SecureFleet.prepare(directory, ["0.0.0.0"], {"prefill": 1, "decode": 2})
    before = contents(directory)
    assert {"prefill-0.crt", "decode-0.key", "decode-1.crt", "ticket.pub", "api.key", "api_keys.json"} <= before.keys()
    key = before["api.key"].decode().strip()
    (entry,) = keys.read(directory / "api_keys.json")
    assert keys.digest(key) == entry.sha256
    assert fleet.file("api.key").stat().st_mode & 0o777 == 0o600

    again = SecureFleet.prepare(directory, ["127.0.0.1"], {"prefill": 1, "decode": 3})
    assert again == fleet
    after = contents(directory)
    assert after.items() >= before.items()
    assert after.keys() - before.keys() == {"decode-2.crt", "decode-2.key"}


def test_the_flags_are_those_that_the_services_know(tmp_path: Path) -> None:
    fleet = SecureFleet.prepare(tmp_path, [], {"prefill": 1, "decode": 2})
    decode = load(DecodeConfig, fleet.worker_flags("decode-1"))
    found = Tls.load(decode, "decode")
    assert found.principal == "baton://decode/decode-1"
    assert Path(decode.ticket_keys).name == "ticket.pub"
    router = load(RouterConfig, ["--prefill=a:1", "--decode=b:1", *fleet.router_flags()])
    assert Tls.load(router, "router") is not None
    assert Path(router.ticket_key).name == "ticket.key"
    assert keys.read(Path(router.api_keys))
    assert fleet.admin().principal == "baton://admin/admin"


def test_a_directory_without_the_key_of_its_ca_makes_no_more_certificates(tmp_path: Path) -> None:
    make_all(tmp_path)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"has no prefill-0\.crt and, to make it, no ca\.key: .* new or empty$"):
        SecureFleet.prepare(tmp_path, [], {"prefill": 1})


@pytest.mark.parametrize("there", ["ca.crt", "ca.key", "ticket.pub", "admin.crt"])
def test_half_a_directory_is_refused_with_advice_that_works(there: str, tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    make_all(whole)
    half.mkdir()
    (half / there).write_bytes((whole / there).read_bytes())
    with pytest.raises(ConfigError, match=r"new or empty$|remove it, and both are made$") as caught:
        SecureFleet.prepare(half, [], {"prefill": 1, "decode": 1})
    assert "--force" not in str(caught.value)
    for lacking in {"ca.crt", "ca.key"} - {there}:
        (half / lacking).write_bytes((whole / lacking).read_bytes())
    if there not in ("ca.crt", "ca.key"):
        (half / there).unlink()
    SecureFleet.prepare(half, [], {"prefill": 1, "decode": 1})
    assert contents(half).keys() > contents(whole).keys() - {
        f"{role}.{kind}" for role in ("prefill", "decode", "mixed") for kind in ("crt", "key")
    }
