"""Floods: one tenant asks for all that it can get, by one RPC or endpoint; another sends small requests all the while.

    alone ── flood ── alone ── flood
    └──────────┴── first tokens of the other tenant: p99 in the floods at most BAR times that without

No fault is injected, and both tenants reach the router past the proxy, which would be the first to be busy with a
flood. The other tenant is a process of its own (tests/chaos/trickle.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx2

from baton.client import AsyncClient
from baton.errors import BatonError, Overloaded
from bench.load import percentile
from tests.chaos.cases import Case
from tests.chaos.fleet import ROOT, Fleet, Shape
from tests.chaos.load import Load, Mix, Spec, tokenizer
from tests.chaos.observe import ledger
from tests.chaos.process import VOCABULARY
from tests.chaos.scene import BAD, TOLD, Row, told

FLOODER, OTHER = "flooder", "other"
MAX_STREAMS = 8
SHAPE = Shape(
    routers=1,
    slots=16,
    prefill_pages=2048,
    decode_pages=2048,
    step_time=0.025,
    chunk_time=0.05,
    model_len=65_536,
    tenants={FLOODER: MAX_STREAMS, OTHER: None},
)
"""Steps and chunks so long that a busy machine does not decide; a router for both tenants."""

CALLERS = MAX_STREAMS + 4
"""Loops that flood; those beyond the limit are refused."""

ROUNDS, ALONE_S, FLOOD_S = 2, 6.0, 8.0
EASE_S, CALM, CALM_BOUND_S = 0.5, 4, 20.0
"""Between a flood and the next time alone: at least so long, until the router has so few requests, at most so long."""

RATE = 8.0
BAR = 3.0
REFUSED_S = 0.05
"""Pause before a refused flooder tries again, whatever it was told."""

START_BOUND_S = 60.0
END_BOUND_S = 45.0
LEAK_BOUND_S = 20.0

TEXT = "The quick brown fox jumps over the lazy dog. " * 23_000
"""A megabyte."""

UNREAD_S = 4.0


class Flooder:
    """The tenant that floods; `kind` says with what."""

    def __init__(
        self, kind: str, client: AsyncClient, http: httpx2.AsyncClient, load: Load, rng: random.Random
    ) -> None:
        self._client, self._http, self._load = client, http, load
        self.calls: Counter[str] = Counter()
        """Ends of the calls that generate nothing."""
        self.problems: list[str] = []
        mix = load.mix
        unread = replace(mix.plain(40, 600), logprobs=20, pause=FLOOD_S, cancel_after=UNREAD_S)
        specs: dict[str, Callable[[], Spec]] = {
            "choices": lambda: replace(mix.plain(40, 16), n=64),
            "prompts": lambda: mix.plain(1000, 4),
            "unread": lambda: unread,
            "cancels": lambda: replace(mix.plain(200, 100), cancel_after=rng.uniform(0, 0.02)),
        }
        name = kind.replace("-", "_")
        self._ask = (lambda: self._generate(specs[kind]())) if kind in specs else getattr(self, f"_{name}")
        if kind not in specs:
            self._text_ids = tokenizer().encode(TEXT, add_special_tokens=False)
            self._ids = [rng.randrange(VOCABULARY) for _ in range(SHAPE.model_len)]
            self._ids_text = tokenizer().decode(self._ids, skip_special_tokens=kind != "http-detokenize")

    async def flood(self, seconds: float) -> None:
        """Flood for so long, and wait for the last answers."""
        end = time.monotonic() + seconds
        tasks = [asyncio.create_task(self._loop(end)) for _ in range(CALLERS)]
        await asyncio.sleep(seconds)
        done, late = await asyncio.wait(tasks, timeout=END_BOUND_S)
        for task in late:
            self.calls["hung"] += 1
            task.cancel()
        self.problems += [f"the flooder failed: {task.exception()!r}" for task in done if task.exception()]

    async def _loop(self, end: float) -> None:
        while time.monotonic() < end:
            if await self._ask() == "refused":
                await asyncio.sleep(REFUSED_S)

    async def _generate(self, spec: Spec) -> str:
        task = self._load.start(spec, "r0")
        outcome = self._load.outcomes[-1]
        await asyncio.wait({task})
        return outcome.end

    async def _tokenize(self) -> str:
        return await self._call(self._client.tokenize(TEXT, add_special_tokens=False), self._text_ids)

    async def _detokenize(self) -> str:
        return await self._call(self._client.detokenize(self._ids), self._ids_text)

    async def _http_completions(self) -> str:
        """As many prompts as the tenant may have streams, with choices."""
        prompts = [self._ids[start : start + 40] for start in range(MAX_STREAMS)]
        return await self._post("/v1/completions", {"prompt": prompts, "max_tokens": 16, "n": 8, "ignore_eos": True})

    async def _http_tokenize(self) -> str:
        return await self._post("/tokenize", {"prompt": TEXT, "add_special_tokens": False}, tokens=self._text_ids)

    async def _http_detokenize(self) -> str:
        return await self._post("/detokenize", {"tokens": self._ids}, prompt=self._ids_text)

    async def _post(self, path: str, body: object, **expected: object) -> str:
        try:
            response = await self._http.post(path, json=body)
        except httpx2.HTTPError as error:
            self.problems.append(f"{path}: {error!r}")
            self.calls["failed"] += 1
            return "failed"
        if response.status_code == 200:
            end = self._compared([response.json()[name] for name in expected], list(expected.values()))
        elif response.status_code == 429:
            end = "refused"
        else:
            end = "failed"
            self.problems.append(f"{path}: {response.status_code} {response.text[:300]}")
        self.calls[end] += 1
        return end

    async def _call(self, asked: Awaitable[object], expected: object) -> str:
        try:
            end = self._compared(await asked, expected)
        except Overloaded:
            end = "refused"
        except BatonError as error:
            end = "failed"
            self.problems.append(f"{type(error).__name__}: {error}")
        self.calls[end] += 1
        return end

    def _compared(self, answer: object, expected: object) -> str:
        if answer == expected:
            return "finished"
        self.problems.append(f"a wrong answer: {str(answer)[:100]}, expected {str(expected)[:100]}")
        return "wrong"


class Other:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, fleet: Fleet, seed: int) -> Other:
        """Return when it begins to send."""
        command = [sys.executable, "-m", "tests.chaos.trickle", fleet.direct("r0"), str(RATE), str(seed)]
        environ = {**os.environ, "BATON_API_KEY": fleet.keys[OTHER], "PYTHONPATH": str(ROOT)}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environ, cwd=ROOT)
        other = cls(process)
        await asyncio.wait_for(other._out.readline(), START_BOUND_S)
        return other

    @property
    def _out(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    async def end(self) -> list[dict[str, Any]]:
        self._process.stdin.close()
        text = await asyncio.wait_for(self._out.read(), 2 * END_BOUND_S)
        await self._process.wait()
        return [json.loads(line) for line in text.splitlines()]


async def run_flood(fleet: Fleet, case: Case, rng: random.Random) -> Row:
    """Alternate the other tenant alone and in the flood; what both saw."""
    row = Row(case, hit="r0")
    alone: list[tuple[float, float]] = []
    flooded: list[tuple[float, float]] = []
    key = fleet.keys[FLOODER]
    base, headers = f"http://127.0.0.1:{fleet.http['r0']}", {"authorization": f"Bearer {key}"}
    async with (
        AsyncClient(fleet.direct("r0"), api_key=key) as client,
        httpx2.AsyncClient(base_url=base, headers=headers, timeout=END_BOUND_S) as http,
    ):
        load = Load({"r0": client}, Mix(rng), rng)
        flooder = Flooder(case.state, client, http, load, rng)
        other = await Other.start(fleet, rng.randrange(2**32))
        for _ in range(ROUNDS):
            await _calm(fleet)
            alone.append(await _window(asyncio.sleep(ALONE_S)))
            flooded.append(await _window(flooder.flood(FLOOD_S), FLOOD_S))
        answers = await other.end()
        for outcome in await load.finish(0.0):
            row.problems.append(told(outcome))
    row.counts = load.counts() + flooder.calls
    row.sent = row.counts.total()
    row.problems += flooder.problems[:TOLD]
    row.problems += [told(outcome) for outcome in load.outcomes if outcome.end in BAD][:TOLD]
    row.lost = row.counts["failed"]
    _compare(row, answers, alone, flooded)
    await row.settle(fleet, LEAK_BOUND_S)
    return row


async def _calm(fleet: Fleet) -> None:
    """Wait until what a flood left waiting is served."""
    end = time.monotonic() + CALM_BOUND_S
    while time.monotonic() < end:
        await asyncio.sleep(EASE_S)
        book = await ledger(fleet, "r0")
        if book is not None and len(book.entries) <= CALM:
            return


async def _window(during: Awaitable[None], seconds: float = math.inf) -> tuple[float, float]:
    """Wait for it; from when to when it lasted, `seconds` at most."""
    began = time.monotonic()
    await during
    return began, min(time.monotonic(), began + seconds)


def _compare(
    row: Row,
    answers: list[dict[str, Any]],
    alone: list[tuple[float, float]],
    flooded: list[tuple[float, float]],
) -> None:
    """Sort the other tenant's requests into those alone and those in the flood, and compare their first tokens."""
    firsts: tuple[list[float], list[float]] = [], []
    for answer in answers:
        if answer["end"] != "finished":
            row.problems.append(f"a request of the other tenant: {answer['end']}, {answer['error']}")
            continue
        for times, windows in zip(firsts, (alone, flooded), strict=True):
            if any(began <= answer["sent"] < end for began, end in windows):
                times.append(answer["first"] - answer["sent"])
    if not all(firsts):
        row.problems.append("the other tenant has too few answers to compare")
        return
    before, within = (percentile(times, 0.99) for times in firsts)
    row.note = f"p99 to the first token of the other tenant: {before:.3f} s alone, {within:.3f} s in the flood"
    if within > BAR * before:
        row.problems.append(f"{row.note}, more than {BAR:g} times that alone")
