"""Conversations with a decode worker of `tests.decode_rig`, whose router names the blocks of each prompt."""

from collections.abc import Sequence

from baton.request import SamplingParams
from baton.telemetry import metrics
from decode_svc.attempts import DecodeAttempt
from tests.decode_rig import Rig, SessionRouter
from tests.decoding import alone, digests
from tests.metrics import count

PROMPT = list(range(3, 43))
"""Two blocks of 16, and half of a third."""
PINNED = 32


def names(all_: Rig, ids: Sequence[int], salt: bytes = b"") -> dict[str, bytes]:
    return {"prefix_digests": b"".join(digests(all_.engine, ids, salt)), "cache_salt": salt}


def received() -> float:
    return count(metrics.TRANSFER_BYTES, "received")


async def turn(all_: Rig, router: SessionRouter, name: str, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """One turn of a conversation; returns prompt and answer."""
    await router.request(name, prompt, params, **names(all_, prompt))
    await router.until_finished((name, 0))
    assert router.tokens[name, 0] == alone(prompt, params)
    return [*prompt, *router.tokens[name, 0]]


def attempt_of(all_: Rig, name: str) -> DecodeAttempt:
    """The live attempt of that name."""
    (attempt,) = (each for each in all_.app.service.worker.attempts if each.key.request_id == name)
    return attempt
