"""Helpers of decode's tests: prompts prefilled by hand on a fake engine, and an engine that keeps a log."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.engine.contract import Engine, KvHandle, PromptChunk
from baton.engine.core import LaunchedPass
from baton.engine.fake import FakeEngine, expected_tokens
from baton.errors import EngineError
from baton.kv.format import PartData
from baton.kv.hashing import block_digests, chain_root
from baton.request import FirstToken, Handoff, SamplingParams, SequenceState, finish_reason
from decode_svc.attempts import Attempts, DecodeAttempt
from decode_svc.messages import Reserve
from decode_svc.reservation import size_reservation
from tests.engine_calls import prefill_chunk

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@dataclass(frozen=True)
class Prefilled:
    """A handoff with its KV, by layer."""

    handoff: Handoff
    layers: list[list[PartData]]

    def write(self, engine: Engine, handle: KvHandle, first: int = 0) -> None:
        """Put the KV, from token `first` on, into another engine's pages."""
        for layer, parts in enumerate(self.layers):
            rest = [_from(part, first) for part in parts]
            if first < parts[0].shape[0]:
                engine.write_kv(handle, layer, first, 0, rest)


def _from(part: PartData, first: int) -> PartData:
    tokens, *rest = part.shape
    return PartData(part.name, part.dtype, (tokens - first, *rest), part.data[len(part.data) // tokens * first :])


def digests(engine: Engine, ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    spec = engine.spec
    root = chain_root(spec.fingerprint, spec.kv_format.digest, salt)
    return block_digests(root, ids, spec.kv_format.block_size)


def take_pages(
    attempts: Attempts,
    session_number: int,
    reservation: Reserve,
    now: float,
    limit_s: float = math.inf,
    *,
    reserve_tokens: int = 100,
) -> DecodeAttempt:
    """Size a reservation and take its pages, as admission does."""
    size = size_reservation(attempts._engine.spec, reservation, reserve_tokens)
    deadline = math.inf if reservation.deadline_s is None else now + reservation.deadline_s
    return attempts.take_pages(session_number, reservation, size, now, limit_s, deadline)


def prefill(
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    *,
    request_id: str = "r",
    attempt: int = 0,
    choices: Sequence[int] = (0,),
    outputs: Sequence[int] = (),
    **settings: Any,
) -> Prefilled:
    """Prefill on a fake engine of its own, made with `settings`."""
    engine = FakeEngine(**{"page_size": 4, "pages": 1024, **settings})
    ids = [*prompt, *outputs]
    handle = engine.reserve("prefill", len(ids))
    states = [SequenceState(params, list(prompt), list(outputs), choice) for choice in choices]
    result = prefill_chunk(engine, handle, ids, 0, len(ids), on_layer=lambda layer: None, sample=states)
    firsts = tuple(
        FirstToken(choice, token, finish_reason(params, [*outputs, token.token_id], engine.spec.eos_token_ids))
        for choice, token in zip(choices, result.tokens, strict=True)
    )
    layers = [
        engine.read_kv(handle, layer, range(len(ids)), range(engine.spec.kv_format.heads))
        for layer in range(engine.spec.kv_format.layers)
    ]
    handoff = Handoff(request_id, attempt, tuple(prompt), tuple(outputs), params, firsts)
    return Prefilled(handoff, layers)


def alone(prompt: Sequence[int], params: SamplingParams, choice: int = 0, **engine: Any) -> list[int]:
    """All output tokens of a choice, by the fake engine's formula, up to what ends it."""
    settings = FakeEngine(**{"pages": 1, **engine}).spec
    tokens = expected_tokens(
        prompt, params.max_tokens or 0, params=params, choice_index=choice, vocab_size=settings.vocab_size
    )
    for count in range(1, len(tokens) + 1):
        if finish_reason(params, tokens[:count], settings.eos_token_ids) is not None:
            return tokens[:count]
    return tokens


class LoggingEngine(FakeEngine):
    """A fake engine that keeps the owners of each step's batch, and can be stopped before a step or made to fail.

    While `gate` is not set, a step waits for it; `entered` is released as each step begins. `count_work` is called for
    each heartbeat.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.fail_next = ""
        self.broken = False
        self.count_work: Callable[[], int] = lambda: 0

    def work_counter(self) -> int:
        return self.count_work()

    def launch(self, chunks: Sequence[PromptChunk] = (), *, step: bool = True) -> LaunchedPass:
        """Log, wait, fail or step; chunks are computed at once."""
        if chunks:
            return super().launch(chunks, step=step)
        self.steps.append(sorted(each.handle.owner for each in self.batch))
        self.entered.release()
        if not self.gate.wait(60):
            raise EngineError("the test never opened the gate")
        if self.fail_next:
            message, self.fail_next = self.fail_next, ""
            raise EngineError(message)
        return super().launch()

    def audit(self) -> dict[str, int]:
        """Fail if told to."""
        if self.broken:
            raise EngineError("page audit failed: told so by the test")
        return super().audit()


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return replace(GREEDY, max_tokens=max_tokens, **more)
