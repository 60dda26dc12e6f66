"""A follow-up turn on a prefill worker that lacks what a decode worker holds, end to end and without Redis."""

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import Fleet
from tests.prefill import fetch_all

PROMPT = prompt_ids(100)


async def test_a_follow_up_turn_is_fetched_from_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)
    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32", page_size=16, block_size=16) as fleet:
        decode = await fleet.decode()
        first = await fleet.router([await fleet.prefill()], [decode])
        told = await first.complete(PROMPT, max_tokens=30, temperature=0, ignore_eos=True)
        turn = [*PROMPT, *(token.token_id for token in told.choices[0].tokens), *prompt_ids(20, seed=1)]
        # This router's prefill worker has seen nothing.
        second = await fleet.router([await fleet.prefill()], [decode])
        plain = await first.complete(turn, max_tokens=8, temperature=0, ignore_eos=True, cache="off")
        found = await second.complete(turn, max_tokens=8, temperature=0, ignore_eos=True)
        # All but the last output token has KV at decode; whole blocks of it are held.
        held = (len(PROMPT) + 29) // 16 * 16
        assert (found.usage.cached_tokens, found.usage.cached.peer, found.usage.cached.decode) == (held, held, held)
        assert found.choices[0].tokens == plain.choices[0].tokens
