"""Placement with prefix affinity against random, round-robin and least loaded, on simulated fleets of any size.

    python -m bench.routing [--workers 10 100 1000] [--per-worker 30] [--trace FILE]

Half of the workers prefill, half decode. The routers' own policy, fleet and index make the decisions, with news of load
and prefixes that is as late as a worker's status; only time and workers are simulated. A prefill worker serves one
prompt at a time, in order, at its rate, and keeps blocks in the order of last use; decode takes a fixed time per token.
As many requests come as would keep prefill busy for `LOAD` of the time if nothing were cached; a trace from a file is
sped up or slowed down for that.

Told by policy, routers and workers: microseconds of a decision (index and choice, wall time and CPU time, under the
stream of news), the share of prompt tokens found at prefill and pinned at decode, time to first token, and how evenly
prefill was busy (standard deviation, most and least, over the mean). With three routers, each gets every third request.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import random
import statistics
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from baton.bench import traces as mooncake
from baton.bench.stats import percentile
from baton.bench.traces import Arrival
from baton.kv.format import KvFormat, KvPart
from bench import traces
from bench.common import save
from router.placement.fleet import RECENT_S, DecayingSum, DecodeView, FleetView, PrefillView
from router.placement.policy import PlacementQuery, Selection, select_workers
from router.placement.prefix_index import NAME_BYTES, NO_MATCH, PrefixIndex

LOAD = 0.8
PROMPT_S = 3.0
"""What a prompt of mean length takes without cache."""

NEWS_S = 0.02
"""From a change at a worker until routers know of it."""

CACHED_PROMPTS = 16
"""Prompts of mean length that fit a worker's cache."""

TOKEN_S, SLOTS = 0.02, 16
KV = KvFormat((KvPart("k", "bfloat16", (8, 128)), KvPart("v", "bfloat16", (8, 128))), layers=32, block_size=16)


@cache
def digest(block: int) -> bytes:
    """The name of a block of a trace."""
    return hashlib.sha256(block.to_bytes(8, "little")).digest()


@dataclass(eq=False)
class Job:
    """One request on its way."""

    arrival: Arrival
    chain: list[bytes]
    router: Router
    arrived: float = 0.0
    rest: int = 0
    """Tokens that its router thinks prefill has to compute."""


class Worker:
    """What both roles share: blocks in the order of last use, and what routers have not been told of them."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name = name
        self._most = blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self.stored: list[bytes] = []
        self.dropped: list[bytes] = []
        self.told = True

    def held(self, chain: Sequence[bytes]) -> int:
        """Leading blocks that are here."""
        return next((i for i, block in enumerate(chain) if block not in self._blocks), len(chain))

    def keep(self, chain: Sequence[bytes]) -> None:
        """Use blocks, from the last to the first, so that a chain's end is evicted first."""
        for block in reversed(chain):
            if block not in self._blocks:
                self.stored.append(block[:NAME_BYTES])
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self.dropped.append(self._blocks.popitem(last=False)[0][:NAME_BYTES])


class Prefill(Worker):
    """Serves one prompt at a time; its line holds jobs and where they go next."""

    def __init__(self, name: str, blocks: int, rate: float) -> None:
        super().__init__(name, blocks)
        self.rate = rate
        self.line: deque[tuple[Job, Decode]] = deque()
        self.pending = 0
        self.busy_s = 0.0


class Decode(Worker):
    """Serves as many as it has slots, and then in order."""

    def __init__(self, name: str, blocks: int, tokens: int) -> None:
        super().__init__(name, blocks)
        self.line: deque[Job] = deque()
        self.running = 0
        self.tokens, self.used = tokens, 0


class Router:
    """The router's policy with its fleet and indexes, and what it has sent to whom."""

    def __init__(self, block: int, place: Callable[[Router, PlacementQuery], Selection], *, affinity: bool) -> None:
        self.fleet = FleetView()
        self.indexes = {Prefill: PrefixIndex(), Decode: PrefixIndex()}
        self._block, self._place, self._affinity = block, place, affinity
        self.own: dict[str, tuple[int, int, int]] = {}
        self.recent: dict[str, DecayingSum] = {}
        self.numbers = itertools.count()
        self.wall_us: list[float] = []
        self.cpu_us: list[float] = []

    @cached_property
    def names(self) -> tuple[list[str], list[str]]:
        """All prefill and all decode workers, which stay the same."""
        return list(self.fleet.prefill), list(self.fleet.decode)

    def decide(self, job: Job, now: float) -> Selection:
        """Where the job goes."""
        wall, cpu = time.perf_counter(), time.thread_time()
        held = pinnable = NO_MATCH
        if self._affinity:
            held = self.indexes[Prefill].match(job.chain, self._block, now)
            pinnable = self.indexes[Decode].match(job.chain, self._block, now)
        tokens = job.arrival.input_tokens
        choice = self._place(self, PlacementQuery(tokens, prefill_match=held, decode_match=pinnable))
        self.cpu_us.append(1e6 * (time.thread_time() - cpu))
        self.wall_us.append(1e6 * (time.perf_counter() - wall))
        job.rest = tokens - min(held.tokens(choice.prefill), tokens)
        if self._affinity:
            self.indexes[Prefill].expect(choice.prefill, job.chain, now, (tokens - job.rest) // self._block)
        return choice

    def hear(self, worker: Prefill | Decode, stored: list[bytes], dropped: list[bytes], now: float) -> None:
        """Take a worker's news."""
        if self._affinity:
            self.indexes[type(worker)].update(worker.name, reset=False, stored=stored, dropped=dropped)
        self.see(worker, now)

    def see(self, worker: Prefill | Decode, now: float) -> None:
        """What placement knows of it from now on."""
        if isinstance(worker, Decode):
            free = SLOTS - worker.running
            self.fleet.put_decode(DecodeView(worker.name, KV, free_tokens=worker.tokens - worker.used, free_slots=free))
            return
        requests, tokens, sent = self.own.get(worker.name, (0, 0, 0))
        self.fleet.put_prefill(
            PrefillView(
                worker.name,
                KV,
                pending_tokens=worker.pending,
                rate=worker.rate,
                own_requests=requests,
                own_tokens=tokens,
                dispatched=sent,
                recent_tokens=self.recent[worker.name].value(now) if worker.name in self.recent else 0.0,
            )
        )

    def sent(self, worker: Prefill, tokens: int, count: int, now: float) -> None:
        """A prompt went there, or is done (`count` -1)."""
        requests, pending, sent = self.own.get(worker.name, (0, 0, 0))
        self.own[worker.name] = requests + count, pending + count * tokens, sent + (count > 0)
        if count > 0:
            self.recent.setdefault(worker.name, DecayingSum(RECENT_S)).add(tokens, now)
        self.see(worker, now)


@dataclass
class Outcome:
    """What a run counts."""

    first_token_s: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    pinned: int = 0


class Simulation:
    """One trace on one fleet."""

    def __init__(self, workers: int, block: int, mean_tokens: float, routers: list[Router], seed: int) -> None:
        draw, blocks = random.Random(seed), int(CACHED_PROMPTS * mean_tokens / block)
        self._block = block
        rates = [mean_tokens / PROMPT_S * draw.uniform(0.8, 1.2) for _ in range(workers // 2)]
        self.prefills = {f"p{i}": Prefill(f"p{i}", blocks, rate) for i, rate in enumerate(rates)}
        tokens = int(4 * SLOTS * mean_tokens)
        self.decodes = {f"d{i}": Decode(f"d{i}", blocks, tokens) for i in range(workers // 2)}
        self._routers = routers
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.now = 0.0
        self.outcome = Outcome()
        everybody: list[Prefill | Decode] = [*self.prefills.values(), *self.decodes.values()]
        for router, worker in itertools.product(routers, everybody):
            router.see(worker, 0.0)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Serve all of a trace, and let what is left of it end."""
        for number, arrival in enumerate(arrivals):
            job = Job(arrival, [digest(b) for b in arrival.blocks], self._routers[number % len(self._routers)])
            self._at(arrival.at_s, partial(self._arrive, job))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _arrive(self, job: Job) -> None:
        choice, job.arrived = job.router.decide(job, self.now), self.now
        prefill, decode = self.prefills[choice.prefill], self.decodes[choice.decode[0]]
        self.outcome.tokens += job.arrival.input_tokens
        self.outcome.pinned += decode.held(job.chain) * self._block
        job.router.sent(prefill, job.rest, 1, self.now)
        decode.used += job.arrival.input_tokens
        prefill.pending += job.rest
        prefill.line.append((job, decode))
        self._news(prefill)
        self._news(decode)
        if len(prefill.line) == 1:
            self._prefill(prefill)

    def _prefill(self, prefill: Prefill) -> None:
        job, _ = prefill.line[0]
        cached = min(prefill.held(job.chain) * self._block, job.arrival.input_tokens - 1)
        self.outcome.cached += cached
        seconds = (job.arrival.input_tokens - cached) / prefill.rate
        prefill.busy_s += seconds
        self._at(self.now + seconds, partial(self._prefilled, prefill))

    def _prefilled(self, prefill: Prefill) -> None:
        job, decode = prefill.line.popleft()
        self.outcome.first_token_s.append(self.now - job.arrived)
        prefill.keep(job.chain)
        prefill.pending -= job.rest
        job.router.sent(prefill, job.rest, -1, self.now)
        self._news(prefill)
        if prefill.line:
            self._prefill(prefill)
        decode.line.append(job)
        self._decode(decode)

    def _decode(self, decode: Decode) -> None:
        while decode.line and decode.running < SLOTS:
            job = decode.line.popleft()
            decode.running += 1
            self._at(self.now + job.arrival.output_tokens * TOKEN_S, partial(self._decoded, decode, job))
        self._news(decode)

    def _decoded(self, decode: Decode, job: Job) -> None:
        decode.running -= 1
        decode.used -= job.arrival.input_tokens
        decode.keep(job.chain)
        self._decode(decode)

    def _news(self, worker: Prefill | Decode) -> None:
        if worker.told:
            worker.told = False
            self._at(self.now + NEWS_S, partial(self._tell, worker))

    def _tell(self, worker: Prefill | Decode) -> None:
        """All changes since the last news, at once."""
        stored, dropped = worker.stored, worker.dropped
        worker.stored, worker.dropped, worker.told = [], [], True
        for router in self._routers:
            router.hear(worker, stored, dropped, self.now)


def affine(router: Router, query: PlacementQuery) -> Selection:
    """The router's own policy; without hits, the least loaded."""
    choice = select_workers(router.fleet, query, prefill_limit=10**9)
    if choice is None:
        raise RuntimeError("a fleet without limits has a place for everybody")
    return choice


def at_random(router: Router, query: PlacementQuery) -> Selection:
    """Any two workers."""
    prefills, decodes = router.names
    return Selection(_RANDOM.choice(prefills), (_RANDOM.choice(decodes),))


def in_turn(router: Router, query: PlacementQuery) -> Selection:
    """One after the other."""
    prefills, decodes = router.names
    number = next(router.numbers)
    return Selection(prefills[number % len(prefills)], (decodes[number % len(decodes)],))


_RANDOM = random.Random(1)


POLICIES: dict[str, tuple[Callable[[Router, PlacementQuery], Selection], bool]] = {
    "affinity": (affine, True),
    "least loaded": (affine, False),
    "round-robin": (in_turn, False),
    "random": (at_random, False),
}


def measure(arrivals: Sequence[Arrival], block: int, workers: int, policy: str, routers: int) -> dict[str, Any]:
    """One run."""
    place, affinity = POLICIES[policy]
    mean_tokens = statistics.fmean(each.input_tokens for each in arrivals)
    fleet = [Router(block, place, affinity=affinity) for _ in range(routers)]
    simulation = Simulation(workers, block, mean_tokens, fleet, seed=1)
    simulation.run(arrivals)
    outcome, busy = simulation.outcome, [worker.busy_s for worker in simulation.prefills.values()]
    wall, cpu = (list(itertools.chain(*lists)) for lists in zip(*((r.wall_us, r.cpu_us) for r in fleet), strict=True))
    return {
        "workers": workers,
        "routers": routers,
        "policy": policy,
        "decision_us": {
            "wall_p50": round(percentile(wall, 0.5), 1),
            "wall_p99": round(percentile(wall, 0.99), 1),
            "cpu_p50": round(percentile(cpu, 0.5), 1),
            "cpu_p99": round(percentile(cpu, 0.99), 1),
        },
        "prefill_hit_rate": round(outcome.cached / outcome.tokens, 4),
        "repeated_rate": round(traces.repeated(arrivals, block), 4),
        "decode_pinned_rate": round(outcome.pinned / outcome.tokens, 4),
        "ttft_s": {
            "mean": round(statistics.fmean(outcome.first_token_s), 3),
            "p99": round(percentile(outcome.first_token_s, 0.99), 3),
        },
        "busy": {
            "deviation": round(statistics.pstdev(busy) / statistics.fmean(busy), 3),
            "most": round(max(busy) / statistics.fmean(busy), 3),
            "least": round(min(busy) / statistics.fmean(busy), 3),
        },
        "index_blocks": sum(len(index) for router in fleet for index in router.indexes.values()),
    }


def trace(name: str, workers: int, requests: int, file: Path | None) -> tuple[list[Arrival], int]:
    """A trace and its tokens per block; the one of Mooncake's shape goes through a file of the published format."""
    span_s = requests * PROMPT_S / (LOAD * (workers // 2))
    if name == "chat":
        return traces.conversations(traces.CHAT, requests, span_s, seed=2), traces.CHAT.block
    if file is not None:
        arrivals = list(mooncake.read(file))[:requests]
        speed = span_s / (arrivals[-1].at_s or 1.0)
        return [replace(each, at_s=each.at_s * speed) for each in arrivals], mooncake.MOONCAKE_BLOCK
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        mooncake.write(path, traces.conversations(traces.MOONCAKE_LIKE, requests, span_s, seed=3))
        return list(mooncake.read(path)), mooncake.MOONCAKE_BLOCK


def main() -> None:
    """Run all and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--per-worker", type=int, default=30, help="requests for each worker")
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's published format, instead of a generated one")
    settings = parser.parse_args()
    results: dict[str, Any] = {}
    for name in ("chat", "mooncake"):
        results[name] = []
        for workers in settings.workers:
            arrivals, block = trace(name, workers, max(settings.per_worker * workers, 2000), settings.trace)
            for policy, routers in [*((policy, 1) for policy in POLICIES), ("affinity", 3)]:
                results[name].append(measure(arrivals, block, workers, policy, routers))
                print(name, results[name][-1], flush=True)
    save("prefix-routing", results)


if __name__ == "__main__":
    main()
