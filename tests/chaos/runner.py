"""One case with faults: load, the state that is asked for, the fault, its end, and what is left afterwards.

load runs ── some request is in the state ── fault ── held ── healed ── load ends ── fleet serves ── nothing held
                                              └─ time to detect       └─ all ended      └─ every worker works again
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence

import psutil

from baton.client import AsyncClient
from baton.errors import BatonError
from tests.chaos import cases
from tests.chaos.cases import Case
from tests.chaos.damage import damage
from tests.chaos.fleet import Fleet
from tests.chaos.load import Load, Mix, Outcome
from tests.chaos.observe import SERVED, Detector, counter, ledger, rank_faults
from tests.chaos.scene import TOLD, Row, Scene, told
from tests.chaos.storm import storm

RATE = 8.0
"""Requests per second of the mixed load, below what the fleet can do."""

RESET_TOKENS = 400
STATE_BOUND_S = 15.0
END_BOUND_S = 45.0
"""Within this after the fault is healed every request has ended; routers wait 10 s for workers that are gone."""
HEALTH_BOUND_S = 40.0
ORPHAN_BOUND_S = 1.0
LEAK_BOUND_S = 20.0
"""A lease and its margin."""


@contextlib.asynccontextmanager
async def clients_of(fleet: Fleet) -> AsyncIterator[dict[str, AsyncClient]]:
    async with contextlib.AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(AsyncClient(fleet.address(name))) for name in fleet.routers}


async def run_case(
    fleet: Fleet, case: Case, rng: random.Random, mix: Mix | None = None, *, rate: float = RATE, hold: float = 1.0
) -> Row:
    """Run a case on a healthy fleet; `hold` scales how long the fault lasts. `mix` is of the fake engine by default."""
    act = {"storm": storm, "damage": damage}.get(case.fault, _cell)
    row = Row(case)
    await cases.prepare(fleet, case)
    async with clients_of(fleet) as clients:
        load = Load(clients, mix or Mix(rng), rng)
        background = asyncio.create_task(load.open_loop(rate))
        try:
            await asyncio.sleep(0.5)
            began = await act(Scene(fleet, case, load, rng, row, hold))
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
        healed = time.monotonic()
        late, row.heal = await asyncio.gather(load.finish(END_BOUND_S), _healthy(fleet, clients, load.mix, healed, row))
        row.sent, row.counts = len(load.outcomes), load.counts()
        _find_problems(row, load.outcomes, began, healed)
        for outcome in late:
            row.problems.append(await describe(fleet, outcome))
    await row.settle(fleet, LEAK_BOUND_S)
    left, lacking = rank_faults(fleet)
    row.orphans += left
    row.problems += lacking + [f"{row.orphans} ranks without a leader"] * bool(row.orphans)
    return row


async def _cell(scene: Scene) -> float:
    """A cell of the matrix: reach the state, inject, hold and heal; when it began, on the monotonic clock."""
    fleet, case, load, row = scene.fleet, scene.case, scene.load, scene.row
    # Found beforehand, since a search would outlast some states.
    ranks = {name: fleet.ranks_of(name) for name in fleet.workers if fleet.shape.ranks(name) > 1}
    name, other, row.in_state = await _reach(fleet, case, load, scene.rng)
    row.hit = f"{name}-{other}" if case.fault == "pair" else name
    if not row.in_state:
        row.problems.append(f"no request got into the state within {STATE_BOUND_S:g} s")
    detector = Detector(fleet)
    async with detector.watching():
        began = time.monotonic()
        ending = asyncio.create_task(_end(fleet, name, ranks.get(name, ())))
        await cases.inject(fleet, case, name, other, ranks.get(name, ()))
        await cases.ease(fleet, case, name)
        await cases.hold(fleet, case, name, max(0.0, scene.hold * cases.HOLD_S[case.fault] - 1.0))
        if trouble := await cases.heal(fleet, case, name):
            row.problems.append(trouble)
        if ending.done():
            ended, row.orphans = ending.result()
            row.ended, row.back = ended - began, time.monotonic() - began
        ending.cancel()
        await asyncio.sleep(1.0)
    seen = [outcome.ended for outcome in load.outcomes if outcome.end == "failed" and outcome.ended > began]
    if detector.first:
        seen.append(detector.first)
    row.detect = min(seen) - began if seen else None
    return began


async def _end(fleet: Fleet, name: str, ranks: Sequence[psutil.Process]) -> tuple[float, int]:
    """Wait for the end of a process: when it was, and how many of its ranks still run a second later."""
    ended, popen = 0.0, fleet.processes[name].popen
    while True:
        if not ended and (popen is None or popen.poll() is not None):
            ended = time.monotonic()
        left = sum(map(_runs, ranks))
        if ended and (not left or time.monotonic() > ended + ORPHAN_BOUND_S):
            return ended, left
        await asyncio.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def _reach(fleet: Fleet, case: Case, load: Load, rng: random.Random) -> tuple[str, str, int]:
    """Send what brings requests into the state, until the target has some: the target, its peer, how many."""
    names = {"router": fleet.routers, "redis": ["redis"]}.get(case.target)
    names = names or [name for name in fleet.workers if name[0] == case.target[0]]
    others = fleet.prefill if case.target == "decode" else fleet.decode
    end = time.monotonic() + STATE_BOUND_S
    last = 0.0
    while True:
        if time.monotonic() - last > 1.0:
            last = time.monotonic()
            _provoke(case, load, rng, list(fleet.routers))
        found = {name: await _in_state(fleet, case, name) for name in names}
        best = max(found, key=lambda name: found[name])
        if found[best] or time.monotonic() > end:
            return best, rng.choice([each for each in others if each != best] or [best]), found[best]
        await asyncio.sleep(0.01)


def _provoke(case: Case, load: Load, rng: random.Random, routers: list[str]) -> None:
    asked = {
        "waiting": [(24, 64, 60)],
        "prefilling": [(4, 400, 30)],
        "transferring": [(4, 900, 40)],
        "decoding": [(4, 40, 150)],
        cases.BOTH: [(4, 40, 150), (4, 400, 30)],
    }[case.state]
    for count, prompt, tokens in asked:
        for _ in range(count):
            # Streams that are there at every break.
            spec = load.mix.plain(prompt, RESET_TOKENS if case.fault == "reset" else tokens)
            load.send(spec, rng.choice(routers))


async def _in_state(fleet: Fleet, case: Case, name: str) -> int:
    """Number of attempts in the state that touch a process, by its own ledger where it knows the state."""
    if case.state == cases.BOTH:
        book = await ledger(fleet, name)
        return min(sum(entry.state == state for entry in book.entries) for state in cases.WORKING) if book else 0
    known = {"d": cases.DECODE_STATES, "p": cases.PREFILL_STATES, "m": cases.MIXED_STATES}
    states = known.get(name[0], {}).get(case.state, ())
    books = [name]
    if not states:
        books = [name] if name in fleet.routers else fleet.routers
        states = cases.ROUTER_STATES[case.state]
    count = 0
    for each in books:
        book = await ledger(fleet, each)
        count += sum(entry.state in states for entry in book.entries) if book else 0
    return count


def _find_problems(row: Row, outcomes: list[Outcome], began: float, healed: float) -> None:
    """Find what must not be: wrong, hung, untyped, and lost where another worker lives."""
    worst = 0
    for outcome in outcomes:
        bad = outcome.end in ("wrong", "untyped") or (outcome.end == "failed" and not _excused(row, outcome))
        if outcome.end == "failed" and bad:
            row.lost += 1
        if outcome.end == "refused":
            row.refusal = max(row.refusal or 0.0, outcome.ended - outcome.sent)
        if bad and (worst := worst + 1) <= TOLD:
            row.problems.append(told(outcome))
        length, since = outcome.longest_gap
        if since + length > began and since < healed:
            row.stall = max(row.stall, length)
    if worst > TOLD:
        row.problems.append(f"{worst - TOLD} more")


def _excused(row: Row, outcome: Outcome) -> bool:
    """A router's own streams may break with it; nothing else may break anything."""
    return row.case.target == "router" and outcome.router == row.hit


async def _healthy(fleet: Fleet, clients: dict[str, AsyncClient], mix: Mix, since: float, row: Row) -> float | None:
    """Send fresh requests until each router answers them all and each worker has worked: seconds since the healing."""
    # Work that a worker still does for peers that are gone, unknown to it, is no sign of health.
    await asyncio.sleep(0.3)
    before = {name: await counter(fleet, name, SERVED[name[0]]) or 0.0 for name in fleet.workers}
    idle, error = set(fleet.workers), "no fresh request"
    while time.monotonic() - since < HEALTH_BOUND_S:
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + HEALTH_BOUND_S):
                await asyncio.gather(*(_fresh(clients[name], mix) for name in fleet.routers for _ in range(6)))
            error = ""
        except (BatonError, TimeoutError) as caught:
            error = repr(caught)
        for name in list(idle):
            if (now := await counter(fleet, name, SERVED[name[0]])) is not None and now != before[name]:
                idle.discard(name)
        if not idle and not error:
            return time.monotonic() - since
        await asyncio.sleep(0.1)
    row.problems.append(f"not healthy after {HEALTH_BOUND_S:g} s: {error or 'no error'}, without work {sorted(idle)}")
    return None


async def _fresh(client: AsyncClient, mix: Mix) -> None:
    spec = mix.plain(40, 8)
    seeded = {"temperature": 0.0} if spec.seed is None else {"seed": spec.seed}
    found = await client.complete(spec.prompt, max_tokens=spec.max_tokens, ignore_eos=True, timeout=20, **seeded)
    if found.token_ids != spec.expected(0)[0]:
        raise BatonError(f"a fresh request got {found.token_ids}")


async def describe(fleet: Fleet, outcome: Outcome) -> str:
    """Facts that help to find the reason why a request did not end."""
    lines = [told(outcome)]
    for name in [*fleet.routers, *fleet.workers]:
        book = await ledger(fleet, name)
        entries = book.entries if book else ()
        lines += [f"{name}: {entry}" for entry in entries if outcome.request_id and outcome.request_id in entry.owner]
        lines += [] if book else [f"{name}: no ledger"]
        log = fleet.processes[name].log.read_text(errors="replace").splitlines()
        lines += [line for line in log if outcome.request_id and outcome.request_id in line][-5:]
    return "\n  ".join(lines)
