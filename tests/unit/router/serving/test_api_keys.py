"""Callers by their keys, the streams of a tenant, and the guard that stands before every method."""

import hmac
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

import router.serving.front_door
from baton import keys
from baton.errors import ConfigError, Overloaded, Unauthenticated
from router.serving.front_door import ANONYMOUS, ApiKeys, Caller

SECRET = "a secret of the tests"


def header(key: str) -> list[str]:
    return [f"Bearer {key}"]


def test_a_key_stands_for_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    acme = keys.add(path, tenant="acme", max_streams=4)
    beta = keys.add(path, tenant="beta", admin=True)
    api_keys = ApiKeys(str(path), SECRET)
    assert api_keys.caller(header(acme)) == Caller("acme", 4)
    assert api_keys.caller([f"bearer  {beta} "]) == Caller("beta", None, admin=True)


def test_without_a_file_everybody_is_the_one_tenant() -> None:
    assert ApiKeys().caller(()) == ANONYMOUS == Caller("", None, admin=True)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "^an API key is needed, as authorization: Bearer KEY$"),
        (["KEY"], "must be one Bearer KEY"),
        (["Basic KEY"], "must be one Bearer KEY"),
        (["Bearer"], "must be one Bearer KEY"),
        (["Bearer KEY", "Bearer KEY"], "must be one Bearer KEY"),
        (["Bearer " + "x" * 257], "must be one Bearer KEY of at most 256 characters"),
        (["Bearer other"], "^unknown API key$"),
        (["Bearer \udcff"], "^unknown API key$"),
    ],
)
def test_unknown_keys_are_refused_without_an_echo(tmp_path: Path, given: list[str], problem: str) -> None:
    path = tmp_path / "keys.json"
    key = keys.add(path, tenant="acme")
    api_keys = ApiKeys(str(path))
    with pytest.raises(Unauthenticated, match=problem) as refusal:
        api_keys.caller([value.replace("KEY", key) for value in given])
    assert key not in str(refusal.value)


def test_every_entry_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    made = [keys.add(path, tenant="acme") for _ in range(5)]
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(router.serving.front_door, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    ApiKeys(str(path)).caller(header(made[0]))
    assert compared == [keys.digest(key) for key in made]


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.json"
    old = keys.add(path, tenant="acme")
    api_keys = ApiKeys(str(path))
    new = keys.add(path, tenant="acme")
    assert api_keys.caller(header(new)) == Caller("acme")
    entries = json.loads(path.read_text())
    replace(path, {"keys": entries["keys"][1:]})
    with pytest.raises(Unauthenticated):
        api_keys.caller(header(old))
    with caplog.at_level(logging.ERROR):
        replace(path, {"keys": 3})
        for _ in range(3):
            api_keys.caller(header(new))
        assert len(caplog.records) == 1
        assert "keys: must be a list, got 3" in caplog.text
    path.unlink()
    assert api_keys.caller(header(new)) == Caller("acme")


def test_several_tenants_need_a_fleet_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    acme = keys.add(path, tenant="acme")
    api_keys = ApiKeys(str(path))
    beta = keys.add(path, tenant="beta")
    assert api_keys.caller(header(acme)) == Caller("acme")
    with pytest.raises(Unauthenticated):
        api_keys.caller(header(beta))
    with pytest.raises(ConfigError, match=r"^api_keys: '.*': BATON_FLEET_SECRET must be set .* of 2 tenants apart$"):
        ApiKeys(str(path))
    with pytest.raises(ConfigError, match=r"^api_keys: '.*none' can't be read: No such file or directory$"):
        ApiKeys(str(tmp_path / "none"))


def test_a_tenant_has_so_many_streams_at_a_time_over_all_its_keys() -> None:
    api_keys, acme = ApiKeys(), Caller("acme", 2)
    with api_keys.stream(acme), api_keys.stream(acme), api_keys.stream(Caller("beta", 1)), api_keys.stream(ANONYMOUS):
        with (
            pytest.raises(
                Overloaded, match=r"^max_streams: 2 streams of tenant acme are open, 2 are allowed$"
            ) as refusal,
            api_keys.stream(acme),
        ):
            pass
        assert refusal.value.retry_after
    with pytest.raises(KeyError), api_keys.stream(acme):
        raise KeyError
    with api_keys.stream(acme), api_keys.stream(acme):
        pass


def replace(path: Path, document: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(document))
    os.replace(beside, path)
