"""The file of API keys: what is added, what is read, what is refused by name."""

import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from baton import keys
from baton.cli.main import main
from baton.errors import ConfigError

HASH = "ab" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_random_and_only_its_hash_is_kept(path: Path) -> None:
    made = [keys.add(path, tenant="acme", max_streams=4), keys.add(path, tenant="beta", admin=True)]
    assert len(set(made)) == 2
    assert all(len(key) == len("baton_") + 43 for key in made)
    assert not any(key in path.read_text() for key in made)
    assert keys.read(path) == (
        keys.ApiKey(keys.digest(made[0]), "acme", 4),
        keys.ApiKey(keys.digest(made[1]), "beta", None, admin=True),
    )


def test_a_new_file_is_its_owners_and_an_old_one_keeps_its_mode(path: Path, tmp_path: Path) -> None:
    keys.add(path, tenant="acme")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    keys.add(path, tenant="acme")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["keys.json"]


def test_a_tenant_keeps_its_limit_and_another_is_refused_before_the_file_changes(path: Path) -> None:
    keys.add(path, tenant="acme", max_streams=4)
    keys.add(path, tenant="acme")
    assert [entry.max_streams for entry in keys.read(path)] == [4, 4]
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"^keys\[2\].max_streams: another key of acme says 4, got 5$"):
        keys.add(path, tenant="acme", max_streams=5)
    assert path.read_bytes() == before


def test_keys_added_at_the_same_time_are_all_kept(path: Path) -> None:
    adding = [threading.Thread(target=keys.add, args=(path,), kwargs={"tenant": f"t{i}"}) for i in range(16)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert {entry.tenant for entry in keys.read(path)} == {f"t{i}" for i in range(16)}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{", r"^is not JSON: "),
        ("[" * 100_000, r"^is not JSON: "),
        ([], r"^the file: must be an object, got \[\]$"),
        ({}, r"^the file\.keys: is missing$"),
        ({"keys": {}}, r"^keys: must be a list, got \{\}$"),
        ({"keys": [], "tenants": []}, r"^the file: has no field 'tenants'; known are keys$"),
        ({"keys": [3]}, r"^keys\[0\]: must be an object, got 3$"),
        ({"keys": [{"sha256": HASH}]}, r"^keys\[0\]\.tenant: is missing$"),
        (
            {"keys": [{"sha256": HASH, "tenant": "a", "key": "k"}]},
            r"^keys\[0\]: has no field 'key'; known are sha256, ",
        ),
        ({"keys": [{"sha256": "ab", "tenant": "a"}]}, r"^keys\[0\]\.sha256: must be 64 hex digits .* got 'ab'$"),
        ({"keys": [{"sha256": HASH, "tenant": ""}]}, r"^keys\[0\]\.tenant: must be .* got ''$"),
        ({"keys": [{"sha256": HASH, "tenant": "a\n"}]}, r"^keys\[0\]\.tenant: must be .* got 'a\\n'$"),
        ({"keys": [{"sha256": HASH, "tenant": "a", "max_streams": True}]}, r"max_streams: must be .* got True$"),
        ({"keys": [{"sha256": HASH, "tenant": "a", "max_streams": 0}]}, r"max_streams: must be .* got 0$"),
        ({"keys": [{"sha256": HASH, "tenant": "a", "admin": 1}]}, r"admin: must be true or false, got 1$"),
        ({"keys": [{"sha256": HASH, "tenant": t} for t in "ab"]}, r"^keys\[1\]\.sha256: appears twice, got 'abab"),
    ],
)
def test_problems_of_a_file_are_named(document: Any, problem: str) -> None:
    data = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(ConfigError, match=problem):
        keys.parse(data.encode())


def test_the_commands_make_and_list_keys(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.json")
    made = CliRunner().invoke(main, ["key", "new", "--file", path, "--tenant", "acme", "--max-streams", "3", "--admin"])
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert keys.read(Path(path)) == (keys.ApiKey(keys.digest(key), "acme", 3, admin=True),)
    listed = CliRunner().invoke(main, ["key", "list", "--file", path])
    assert listed.stdout.splitlines()[1].split() == ["acme", "3", "yes", f"{keys.digest(key).hex()[:16]}…"]
    assert key not in listed.output


def test_the_commands_refuse_in_a_line(path: Path, tmp_path: Path) -> None:
    path.write_text("{}")
    for arguments in (["new", "--tenant", "acme"], ["list"]):
        result = CliRunner().invoke(main, ["key", *arguments, "--file", str(path)])
        assert result.exit_code == 1
        assert result.output == f"Error: {str(path)!r}: the file.keys: is missing\n"
    assert CliRunner().invoke(main, ["key", "list", "--file", str(tmp_path / "none")]).exit_code == 1


def key_command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["key", *arguments])


def test_keys_are_removed_by_tenant_or_by_the_begin_of_their_hash(path: Path) -> None:
    made = [keys.add(path, tenant=tenant) for tenant in ("acme", "acme", "acme", "beta")]
    first = keys.digest(made[0]).hex()
    done = key_command("remove", f"--file={path}", f"--id={first[:16]}…")
    assert (done.exit_code, done.stderr) == (0, "removed 1 key\n")
    assert [entry.sha256 for entry in keys.read(path)] == [keys.digest(key) for key in made[1:]]
    assert key_command("remove", f"--file={path}", "--tenant=acme").stderr == "removed 2 keys\n"
    assert [entry.tenant for entry in keys.read(path)] == ["beta"]
    before = path.read_bytes()
    for flags, words in ((["--tenant=acme"], "no key of 'acme'"), ([f"--id={first}"], "no key of hash")):
        refused = key_command("remove", f"--file={path}", *flags)
        assert (refused.exit_code, words in refused.stderr) == (1, True)
    for flags in ([], ["--tenant=acme", "--id=a"]):
        assert key_command("remove", f"--file={path}", *flags).exit_code == 2
    assert path.read_bytes() == before


def test_hashes_that_begin_alike_are_not_removed_by_their_begin(path: Path) -> None:
    entries = [{"sha256": f"ab{digit * 62}", "tenant": "acme"} for digit in "01"]
    path.write_text(json.dumps({"keys": entries}))
    with pytest.raises(ConfigError, match=r"^2 hashes begin with 'ab'; give more digits$"):
        keys.remove(path, sha256="ab")
    assert keys.remove(path, sha256="ab1") == 1


def test_the_limit_of_a_tenant_changes_in_all_its_keys(path: Path) -> None:
    for tenant in ("acme", "acme", "beta"):
        keys.add(path, tenant=tenant)
    done = key_command("set", f"--file={path}", "--tenant=acme", "--max-streams=5")
    assert (done.exit_code, done.stderr) == (0, "changed 2 keys\n")
    assert [entry.max_streams for entry in keys.read(path)] == [5, 5, None]
    refused = key_command("new", f"--file={path}", "--tenant=acme", "--max-streams=6")
    assert refused.exit_code == 1
    assert f"baton key set --file {path} --tenant acme --max-streams 6 changes it" in refused.stderr
    assert key_command("set", f"--file={path}", "--tenant=acme", "--no-limit").exit_code == 0
    assert [entry.max_streams for entry in keys.read(path)] == [None, None, None]
    assert key_command("set", f"--file={path}", "--tenant=gone", "--no-limit").exit_code == 1
    assert key_command("set", f"--file={path}", "--tenant=acme").exit_code == 2
