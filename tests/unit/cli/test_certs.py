"""`baton certs`: what the files say, who may read them, and what it never overwrites."""

import datetime
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from baton.cli.main import main
from baton.errors import ConfigError
from tests.certificates import tls


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["certs", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["certs", *arguments])
    assert result.exit_code != 0, result.stdout
    return result.stderr


def names(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def test_one_command_makes_all(tmp_path: Path) -> None:
    out = tmp_path / "new" / "secrets"
    listed = run("--out", str(out), "--days=7", "--host=baton.example.org", "--host=192.0.2.7").split()
    assert sorted(listed) == sorted(str(path) for path in out.iterdir())
    for role in ("router", "prefill", "decode", "mixed", "admin"):
        assert tls(role, out).principal == f"baton://{role}/{role}"
        certificate = x509.load_pem_x509_certificate((out / f"{role}.crt").read_bytes())
        left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        assert datetime.timedelta(days=6) < left <= datetime.timedelta(days=7)
    hosts = ["localhost", "127.0.0.1", "::1", "baton.example.org", "192.0.2.7"]
    assert names(out / "router.crt") == ["router.baton", "baton://router/router", *hosts]
    assert names(out / "decode.crt") == ["decode.baton", "baton://decode/decode"]
    assert names(out / "mixed.crt") == ["mixed.baton", "prefill.baton", "decode.baton", "baton://mixed/mixed"]
    private = load_pem_private_key((out / "ticket.key").read_bytes(), None)
    public = load_pem_public_key((out / "ticket.pub").read_bytes())
    assert isinstance(private, Ed25519PrivateKey)
    assert isinstance(public, Ed25519PublicKey)
    assert private.public_key() == public
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
    assert {modes[name] for name in modes if name.endswith(".key")} == {0o600}


def test_one_more_certificate_is_of_the_same_ca(tmp_path: Path) -> None:
    run("--out", str(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run("--out", str(tmp_path), "--role=decode", "--name=decode-1")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() - before.keys() == {"decode-1.crt", "decode-1.key"}
    assert after.items() >= before.items()
    assert tls("decode-1", tmp_path).principal == "baton://decode/decode-1"


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    run("--out", str(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "ticket.pub would be overwritten; --force allows that, and makes a new CA" in refused("--out", str(tmp_path))
    assert f"{tmp_path / 'decode.key'}" in refused("--out", str(tmp_path), "--role=decode")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    run("--out", str(tmp_path), "--role=decode", "--force")
    assert (tmp_path / "decode.crt").read_bytes() != before["decode.crt"]
    assert (tmp_path / "ca.crt").read_bytes() == before["ca.crt"]
    run("--out", str(tmp_path), "--force")
    assert (tmp_path / "ca.crt").read_bytes() != before["ca.crt"]
    for name in ("decode.crt", "decode.key"):
        (tmp_path / name).write_bytes(before[name])
    with pytest.raises(ConfigError, match="tls_ca"):
        tls("decode", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host=has space"], "--host: must be a name or an IP address without port, got 'has space'"),
        (["--host=baton:50050"], "'baton:50050'"),
        (["--host=decode.baton"], "'decode.baton' is the name of a role"),
        (["--name=x"], "--name needs --role"),
        (["--role=decode", "--name=../x"], "'../x'"),
        (["--role=decode", "--name=ca"], "'ca'"),
        (["--role=decode"], "ca.crt can't be read: No such file or directory"),
        (["--role=cook"], "'cook'"),
        (["--days=0"], "0"),
    ],
)
def test_errors_are_named_and_no_file_is_left(arguments: list[str], words: str, tmp_path: Path) -> None:
    assert words in refused("--out", str(tmp_path), *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "can't be made: Not a directory" in refused("--out", str(tmp_path / "file" / "below"))
