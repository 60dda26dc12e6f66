"""Block digests: golden vectors, and what a digest must depend on."""

import hashlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.hashing import (
    DIGEST_BYTES,
    PackedDigests,
    RollingBlockHasher,
    block_digests,
    chain_root,
    request_salt,
    tenant_salt,
)

FORMAT = "f" * 64


def by_the_book(fingerprint: str, kv_format: str, salt: bytes, ids: list[int], size: int) -> list[bytes]:
    """The definition in the module's docstring, spelled out a second time with struct."""
    root = b""
    for value in (b"baton prefix chain 1", fingerprint.encode(), kv_format.encode(), salt):
        root += struct.pack("<I", len(value)) + value
    parent, out = hashlib.sha256(root).digest(), []
    for start in range(0, len(ids) - size + 1, size):
        block = ids[start : start + size]
        parent = hashlib.sha256(parent + struct.pack(f"<{size}I", *block)).digest()
        out.append(parent)
    return out


def test_golden_vectors() -> None:
    root = chain_root("model-a", FORMAT, b"tenant")
    assert root.hex() == "ef2d132df12b8f79f4fd20d96f2b499c5c6deccddd55381ee64ecc854fcb1c5a"
    assert [d.hex() for d in block_digests(root, list(range(40)), 16)] == [
        "6533ea4dfa5b6f2e8e935539427f629f89fa05a1b1cbfec058057c5ac645f7cb",
        "9ae58d4495dbbd9d8f6f4470c508e4c556e0075b63ed148775d5d581cc28fb82",
    ]
    high = block_digests(chain_root("", ""), [2**32 - 1, 0, 65_536, 256], 4)
    assert [d.hex() for d in high] == ["747f076be7b6bfcadae58f3aaa3f5fbef2cdaaa6101c215840da0a1b52564398"]
    salt = tenant_salt("secret", "acme")
    assert salt.hex() == "a854330108db29ce9f5ebb9945d5364df056d4f801e8e45d31f200eaf602de3e"
    team = request_salt("secret", "acme", "team")
    assert team.hex() == "6d657f86dff4e86938d36734e6aa262b08c3d76165a6131fd7029850c114db3e"
    open_team = request_salt("", "", "team")
    assert open_team.hex() == "360c19609efe339d63b0610fb92e781a7df5d18a6b497fe051a8a5b607333c7e"


@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 500, 40_000])
def test_block_digests_equal_the_definition(block_size: int, tokens: int) -> None:
    ids = random.Random(tokens).choices(range(2**32), k=tokens)
    got = block_digests(chain_root("m", FORMAT, b"s"), ids, block_size)
    assert got == by_the_book("m", FORMAT, b"s", ids, block_size)
    assert all(len(digest) == DIGEST_BYTES for digest in got)


def test_longer_prompts_keep_the_digests_of_their_prefix() -> None:
    root, ids = chain_root("m", FORMAT), list(range(100))
    whole = block_digests(root, ids, 16)
    assert len(whole) == 6
    for length in range(100):
        assert block_digests(root, ids[:length], 16) == whole[: length // 16]


def test_a_digest_depends_on_all_that_its_kv_depends_on() -> None:
    ids = list(range(32))
    base = block_digests(chain_root("m", FORMAT, b"s"), ids, 16)
    others = [
        block_digests(chain_root("n", FORMAT, b"s"), ids, 16),
        block_digests(chain_root("m", "e" * 64, b"s"), ids, 16),
        block_digests(chain_root("m", FORMAT, b"t"), ids, 16),
        block_digests(chain_root("m", FORMAT, b"s"), [99, *ids[1:]], 16),
    ]
    for other in others:
        assert not set(other) & set(base)
    late = block_digests(chain_root("m", FORMAT, b"s"), [*ids[:16], 99, *ids[17:]], 16)
    assert late[0] == base[0]
    assert late[1] != base[1]


def test_fields_can_not_run_into_each_other() -> None:
    assert chain_root("ab", "c", b"") != chain_root("a", "bc", b"")
    assert chain_root("a", "b", b"c") != chain_root("a", "bc", b"")
    assert tenant_salt("a", "bc") != tenant_salt("ab", "c")


def test_a_cache_salt_sets_requests_apart_and_none_changes_nothing() -> None:
    assert request_salt("secret", "acme") == tenant_salt("secret", "acme")
    assert request_salt("", "acme") == b""
    salts = [
        request_salt(secret, tenant, salt)
        for secret in ("a", "ab")
        for tenant in ("c", "cd")
        for salt in ("", "e", "é")
    ]
    assert len(set(salts)) == len(salts)
    assert request_salt("s", "ab", "c") != request_salt("s", "a", "bc")
    assert request_salt("", "any", "c") == request_salt("", "", "c") != request_salt("", "", "d")


def test_an_id_that_is_no_uint32_is_an_error() -> None:
    with pytest.raises(OverflowError):
        block_digests(chain_root("m", FORMAT), [2**32], 1)


def test_packed_digests_are_the_same_as_a_list() -> None:
    plain = block_digests(bytes(32), range(35), 5)
    packed = PackedDigests(b"".join(plain))
    assert (len(packed), list(packed)) == (7, plain)
    for chosen in (slice(None), slice(1, 6, 2), slice(4, 2), slice(-3, None), slice(0, 99)):
        assert packed[chosen] == plain[chosen]
    assert (packed[-1], packed[3]) == (plain[-1], plain[3])
    with pytest.raises(IndexError):
        packed[7]
    assert list(PackedDigests(b"")) == []


ROOT = chain_root("m", FORMAT)


@given(st.integers(0, 21), st.lists(st.integers(1, 9), max_size=6))
def test_a_rolling_hasher_names_all_blocks_but_that_of_the_last_token(context: int, steps: list[int]) -> None:
    ids = list(range(7, 7 + context))
    names = block_digests(ROOT, ids, 4)
    first = RollingBlockHasher(ROOT, 4, names, ids[len(names) * 4 :])
    hasher = first.fork(1)
    ids.append(1)
    for step in steps:
        tokens = list(range(100, 100 + step))
        hasher.extend(tokens)
        ids += tokens
        assert hasher.digests == block_digests(ROOT, ids[:-1], 4)
    assert first.digests == names


@pytest.mark.parametrize("context", [3, 4])
def test_forks_of_a_rolling_hasher_go_different_ways(context: int) -> None:
    ids = list(range(context))
    names = block_digests(ROOT, ids, 4)
    hasher = RollingBlockHasher(ROOT, 4, names, ids[len(names) * 4 :])
    one, two = hasher.fork(50), hasher.fork(60)
    one.extend(range(8))
    two.extend(range(8))
    assert one.digests == block_digests(ROOT, [*ids, 50, *range(7)], 4)
    assert two.digests == block_digests(ROOT, [*ids, 60, *range(7)], 4)
    assert one.digests[: len(names)] == two.digests[: len(names)] == names
