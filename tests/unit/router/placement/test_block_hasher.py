"""Names of a request's blocks, from prompt to replay."""

import asyncio
import threading
from typing import Any

import pytest

import router.placement.prefix_directory
from baton.kv.hashing import PackedDigests, block_digests, chain_root
from router.placement.prefix_directory import BlockHasher, BlockNamespace

RUN = asyncio.to_thread
ONE, OTHER = BlockNamespace("m", "f" * 64, 16), BlockNamespace("m", "e" * 64, 4)


def whole(form: BlockNamespace, ids: list[int], salt: bytes = b"s") -> PackedDigests:
    return PackedDigests(
        b"".join(block_digests(chain_root(form.fingerprint, form.kv_format, salt), ids, form.block_size))
    )


@pytest.mark.parametrize("count", [1, 15, 16, 40, 5000])
async def test_chains_are_those_of_the_workers_and_go_on_in_a_replay(count: int) -> None:
    prompt, output = list(range(count)), [7] * 21
    hasher = BlockHasher(prompt, b"s", RUN)
    assert await hasher.hash([ONE, OTHER]) == {form: whole(form, prompt) for form in (ONE, OTHER)}
    for end in (1, 3, 21):
        replay = await hasher.hash([ONE, OTHER], output[:end])
        assert replay == {form: whole(form, prompt + output[:end]) for form in (ONE, OTHER)}
    assert await hasher.hash([ONE]) == {ONE: whole(ONE, prompt)}
    assert await BlockHasher(prompt, b"t", RUN).hash([OTHER]) == {OTHER: whole(OTHER, prompt, b"t")}


@pytest.mark.parametrize(("count", "inline"), [(4096, True), (4097, False)])
async def test_a_long_prompt_is_hashed_off_the_loop(monkeypatch: pytest.MonkeyPatch, count: int, inline: bool) -> None:
    calls: list[bool] = []

    def noted(*arguments: Any) -> list[bytes]:
        calls.append(threading.current_thread() is threading.main_thread())
        return block_digests(*arguments)

    monkeypatch.setattr(router.placement.prefix_directory, "block_digests", noted)
    hasher = BlockHasher(range(count), b"", RUN)
    for _ in range(3):
        await hasher.hash([ONE])
    assert calls == [inline]
