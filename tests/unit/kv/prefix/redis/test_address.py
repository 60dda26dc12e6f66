"""URLs of the shared prefix cache: what they mean, and what is said of those that mean nothing."""

import pytest

from baton.errors import ConfigError
from baton.kv.format import KvFormat, KvPart
from baton.kv.prefix.redis.address import RedisAddress, check_url, parse_redis_url
from baton.worker.prefix_cache import open_prefix_cache

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)),), layers=2, block_size=4)


MEANINGS = {
    "redis://host": RedisAddress("server", "redis://host:6379/?", (("host", 6379),)),
    "redis://": RedisAddress("server", "redis://localhost:6379/?", (("localhost", 6379),)),
    "redis://u:p%40@host:1/3": RedisAddress("server", "redis://u:p%40@host:1/3?", (("host", 1),)),
    "rediss://[::1]:7?db=2": RedisAddress("server", "rediss://[::1]:7/?db=2", (("::1", 7),)),
    "unix:///run/redis.sock?db=1": RedisAddress("server", "unix:///run/redis.sock?db=1"),
    "unix://u:p@/run/redis.sock": RedisAddress("server", "unix://u:p@/run/redis.sock"),
    "redis+cluster://a,b:2,[::1]:3": RedisAddress("cluster", "redis://a:6379/?", (("a", 6379), ("b", 2), ("::1", 3))),
    "rediss+cluster://:p@a/?ssl_cert_reqs=none": RedisAddress(
        "cluster", "rediss://:p@a:6379/?ssl_cert_reqs=none", (("a", 6379),)
    ),
    "redis+sentinel://a,b:2/main/4": RedisAddress("sentinel", "redis://a:26379/4?", (("a", 26379), ("b", 2)), "main"),
    "redis+sentinel://u:p@a/main?sentinel_username=s&client_name=c&sentinel_password=q": RedisAddress(
        "sentinel", "redis://u:p@a:26379/?client_name=c", (("a", 26379),), "main", "s", "q"
    ),
}


@pytest.mark.parametrize(("url", "address"), MEANINGS.items())
def test_redis_urls_are_parsed(url: str, address: RedisAddress) -> None:
    assert parse_redis_url(url) == address
    check_url(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memcached://host", "must be none or begin with redis://"),
        ("redis:/host", "must be none or begin with redis://"),
        ("embedded", "must be none or begin with redis://"),
        ("http://user:hidden@host", "got 'http://host'"),
        ("redis+tls://host", "must be none or begin with redis://"),
        ("redis://:hidden@host:port", "the port must be a number"),
        ("redis://:hidden@host:0", "from 1 to 65535"),
        ("redis://:hidden@host:70000", "from 1 to 65535"),
        ("redis://:hidden@a,b", "takes one host"),
        ("redis://:hidden@host/name", "the database must be a number"),
        ("redis://host?db=hidden", "the database must be a number"),
        ("unix://relative/path", "an absolute path"),
        ("redis+cluster://:hidden@a,,b", "a host is missing"),
        ("redis+cluster://:hidden@a/1", "no databases but 0"),
        ("redis+cluster://:hidden@a?db=1", "no databases but 0"),
        ("redis+sentinel://:hidden@a,b", "needs the name of the service"),
        ("redis://:hidden@host?timeout=3", "option 'timeout' must be one of db"),
        ("redis://:hidden@host?ssl_cert_reqs=none", "option 'ssl_cert_reqs' needs rediss"),
        ("redis://host?sentinel_password=hidden", "option 'sentinel_password' must be one of"),
        ("rediss://:hidden@host?ssl_ca_certs=/nowhere/ca.crt", "ssl_ca_certs: no such file: '/nowhere/ca.crt'"),
        ("redis://:hidden@[::1:6379", "not an address"),
        ("redis://:hidden?x@host", "must be percent-encoded"),
        ("rediss://u:x?hidden@host?ssl_cert_reqs=none", "must be percent-encoded"),
        ("unix://u:hidden?x@/run/redis.sock", "must be percent-encoded"),
        ("redis://:hidden#x@host", "must be percent-encoded"),
        ("redis://:hidden[x@host", "must be percent-encoded"),
        ("redis://:hidden\N{FULLWIDTH NUMBER SIGN}x@host", "must be percent-encoded"),
        ("redis://:hidden/x@host", "the port must be a number"),
    ],
)
def test_faults_are_named_without_passwords(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^redis: ") as caught:
        open_prefix_cache(url, FORMAT, "s")
    assert said in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_options_that_redis_py_refuses() -> None:
    with pytest.raises(ConfigError, match=r"^redis: .*ssl_min_version"):
        open_prefix_cache("rediss://host?ssl_min_version=new", FORMAT, "s")


def test_url_none_disables_the_prefix_cache() -> None:
    for url in ("", "none"):
        check_url(url)
        assert not open_prefix_cache(url, FORMAT, "").enabled


def test_an_address_shows_no_password() -> None:
    shown = repr(parse_redis_url("redis+sentinel://u:hidden@a/main?sentinel_password=hidden"))
    assert "hidden" not in shown
