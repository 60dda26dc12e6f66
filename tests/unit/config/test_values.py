"""Text forms of addresses and sizes."""

import pytest

from baton.config.values import complete_address, format_bytes, is_loopback, parse_address, parse_bytes
from baton.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("4GiB", 4 << 30), ("4gb", 4 * 10**9), ("64M", 64 << 20), ("1.5 KiB", 1536)],
)
def test_byte_sizes_are_parsed_and_formatted(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 GiBs", "nan"])
def test_invalid_byte_sizes_are_refused(text: str) -> None:
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


@pytest.mark.parametrize(
    ("kv", "dialled", "complete_"),
    [
        (":7", "10.0.0.1:5", "10.0.0.1:7"),
        (":7", "[fd00::3]:5", "[fd00::3]:7"),
        ("kv.host:7", "10.0.0.1:5", "kv.host:7"),
    ],
)
def test_kv_address_is_completed(kv: str, dialled: str, complete_: str) -> None:
    assert complete_address(kv, dialled) == complete_
