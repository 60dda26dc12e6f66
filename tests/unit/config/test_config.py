"""Flags and environment become a frozen dataclass, or an error that names what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.config import is_loopback, load, option, parse_address, parse_bytes
from baton.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    """A sample service."""

    model: str
    control: str = option("127.0.0.1:0", help="Where to listen.", unit="address")
    device: str = option("auto", help="Where to compute.", choices=("auto", "cpu"))
    kv_memory: int = option(0, help="Memory.", unit="bytes", minimum=0)
    slots: int = option(32, help="Slots.", minimum=1)
    lease_s: float = 10.0
    insecure: bool = False
    workers: tuple[str, ...] = ()
    fleet_secret: str = option("", help="Secret.", secret=True)
    plain: int = field(default=3, metadata={"help": "Plain metadata works too."})


def make(*argv: str, **environ: str) -> Sample:
    return load(Sample, "sample", argv, environ)


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*argv, **environ)
    return str(caught.value)


def test_defaults_flags_and_environment() -> None:
    assert make("--model", "m") == Sample("m")
    assert make("--model=m", "--kv-memory", "1.5GiB", "--slots=7", "--lease-s", "2.5", "--insecure") == Sample(
        "m", kv_memory=3 << 29, slots=7, lease_s=2.5, insecure=True
    )
    assert make(BATON_MODEL="m", BATON_WORKERS="a:1, b:2", BATON_FLEET_SECRET="s", PATH="/bin") == Sample(
        "m", workers=("a:1", "b:2"), fleet_secret="s"
    )


def test_a_flag_beats_the_environment() -> None:
    assert make("--model", "flag", BATON_MODEL="variable").model == "flag"


def test_booleans_with_and_without_value() -> None:
    assert make("--model", "m", "--insecure", "false").insecure is False
    assert make("--insecure", "--model", "m").insecure is True
    assert make("--model", "m", BATON_INSECURE="yes").insecure is True


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--nope", "1"], ["--nope", "unknown"]),
        (["stray"], ["stray"]),
        (["--model"], ["--model", "value"]),
        (["--model", "a", "--model", "b"], ["--model", "twice"]),
        (["--model", "m", "--slots", "many"], ["--slots", "integer", "'many'"]),
        (["--model", "m", "--slots", "0"], ["--slots", "at least 1", "'0'"]),
        (["--model", "m", "--kv-memory", "-1"], ["--kv-memory", "'-1'"]),
        (["--model", "m", "--kv-memory", "4 parsecs"], ["--kv-memory", "'4 parsecs'"]),
        (["--model", "m", "--lease-s", "nan"], ["--lease-s", "'nan'"]),
        (["--model", "m", "--device", "tpu"], ["--device", "auto, cpu", "'tpu'"]),
        (["--model", "m", "--control", "nohost"], ["--control", "HOST:PORT", "'nohost'"]),
        (["--model", "m", "--control", "h:70000"], ["--control", "'h:70000'"]),
        (["--model", "m", "--fleet-secret", "s"], ["--fleet-secret", "BATON_FLEET_SECRET"]),
        ([], ["--model", "BATON_MODEL", "required"]),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], parts: list[str]) -> None:
    message = refused(*argv)
    assert all(part in message for part in parts), message


def test_a_bad_variable_is_named() -> None:
    assert "BATON_SLOTS" in refused("--model", "m", BATON_SLOTS="x")
    assert "BATON_NOPE" in refused("--model", "m", BATON_NOPE="x")
    assert "BATON_slots" in refused("--model", "m", BATON_slots="3")


def test_a_variable_of_another_role_is_no_error() -> None:
    assert make("--model", "m", BATON_CHUNK_SIZE="17") == Sample("m")


def test_a_secret_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        make("--help")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--kv-memory, BATON_KV_MEMORY" in text
    assert "--fleet-secret" not in text
    assert "hush" not in repr(make("--model", "m", BATON_FLEET_SECRET="hush"))


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("4GiB", 4 << 30), ("4gb", 4 * 10**9), ("64M", 64 << 20), ("1.5 KiB", 1536)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 GiBs", "nan"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_addresses() -> None:
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("prefill-0.prefill:9000") == ("prefill-0.prefill", 9000)
    for bad in ("", "host", "host:", ":80", "host:-1", "a:b:80", "host:99999"):
        with pytest.raises(ConfigError):
            parse_address(bad)


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5
