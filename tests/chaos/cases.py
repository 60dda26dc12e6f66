"""All cases, and what the matrix does to a fleet.

The matrix is which fault hits whom while a request is in which state. Beside it stand storms (tests/chaos/storm.py),
damaged records (tests/chaos/damage.py) and floods (tests/chaos/flood.py).
"""

import asyncio
import random
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import psutil

from tests.chaos.fleet import REAL_TOKEN_BYTES, Fleet
from tests.chaos.process import TOKEN_BYTES

TARGETS = ("router", "prefill", "decode", "redis")
FAULTS = ("kill", "stop", "hang", "cut", "pair", "slow", "reset", "restart", "names")
STATES = ("waiting", "prefilling", "transferring", "decoding")

BOTH = "both"
"""State of a worker of both roles: it prefills and decodes, so its passes have prompts and steps."""

RANK_FAULTS = ("rank-kill", "rank-stop", "leader-kill", "leader-stop")
"""Of workers with several ranks: rank 1 or the leader, which is rank 0, is killed or stands still."""

SLOW_RATES = {"kv": 80_000, "redis": 80_000}
"""Bytes per second of slow links by the first part of their name: less than what the mixed load needs."""

SLOW_CONTROL_RATE = 8_000
"""Of all other slow links."""

TRANSFER_RATE = 300_000
"""Bytes per second of KV links before a fault that is to hit a transfer: enough for the load, with long transfers."""

HOLD_S = {"kill": 1.5, "slow": 6.0, "reset": 6.0, "restart": 0.0, "hang": 0.0}
HOLD_S |= {"rank-kill": 0.0, "rank-stop": 0.0, "leader-kill": 1.5, "leader-stop": 9.0}
HOLD_S |= dict.fromkeys(("stop", "cut", "pair", "names"), 9.0)
"""Length of a fault; long enough that a silent peer must have been noticed."""

RESETS = 6
"""Number of times that connections between routers and workers break in one case, each time those of another worker: a
stream that moved away from the first break meets the next."""

DECODE_STATES = {
    "waiting": ("reserved", "slot_wait"),
    "prefilling": ("reserved", "transferring"),
    "transferring": ("transferring",),
    "decoding": ("decoding",),
}
PREFILL_STATES = {"waiting": ("preparing",), "prefilling": ("prefilling",), "transferring": ("held",), "decoding": ()}
WORKING = ("prefilling", "decoding")
MIXED_STATES = {
    "waiting": ("preparing", "reserved", "slot_wait"),
    "prefilling": ("prefilling",),
    "transferring": ("held",),
    "decoding": ("decoding",),
}
ROUTER_STATES = {
    "waiting": ("queued", "reserving"),
    "prefilling": ("prefilling",),
    "transferring": ("transferring",),
    "decoding": ("decoding",),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix, or a case beside it; `state` is then its variant."""

    target: str
    fault: str
    state: str

    @property
    def name(self) -> str:
        """Such as "decode/kill/decoding"."""
        return f"{self.target}/{self.fault}/{self.state}"

    @property
    def applicable(self) -> bool:
        """A link of one pair has a prefill and a decode worker at its ends; sessions join routers with workers.

        Only workers have an engine that can hang; only Redis is dialled by a name that may not resolve.
        """
        if self.fault == "names":
            return self.target == "redis"
        return self.fault not in ("pair", "reset", "hang") or self.target in ("prefill", "decode", "mixed")


MATRIX = [Case(target, fault, state) for target in TARGETS for fault in FAULTS for state in STATES]
RANKS = [Case(target, fault, state) for target in ("prefill", "decode") for fault in RANK_FAULTS for state in STATES]
MIXED = [Case("mixed", fault, state) for fault in FAULTS if fault != "names" for state in (*STATES, BOTH)]
STORM = Case("workers", "storm", "mixed")
DAMAGE = Case("redis", "damage", "mixed")
FLOODS = [
    Case("tenant", "flood", kind)
    for kind in (
        *("choices", "prompts", "tokenize", "detokenize", "unread", "cancels"),
        *("http-completions", "http-tokenize", "http-detokenize"),
    )
]
CASES = [*(case for case in MATRIX if case.applicable), STORM, DAMAGE, *FLOODS, *RANKS, *MIXED]

CELLS_BETWEEN_STORMS = 20


def plan(rng: random.Random) -> list[Case]:
    """All cases but those of RANKS and MIXED, those that are not in the old matrix early and more than once."""
    cells = [case for case in MATRIX if case.applicable]
    first = [case for case in cells if case.fault == "reset"]
    rest = [case for case in cells if case.fault != "reset"]
    rng.shuffle(rest)
    planned = [STORM, *first, DAMAGE, *FLOODS]
    for index, case in enumerate(rest, 1):
        planned.append(case)
        if index % CELLS_BETWEEN_STORMS == 0:
            planned.append(STORM)
        if index == len(rest) // 2:
            planned += [DAMAGE, *FLOODS]
    return planned


def parse(name: str) -> Case:
    """The case of a name; raises ValueError for one that is not there."""
    case = Case(*name.split("/"))
    if case not in CASES:
        raise ValueError(f"{name}: no such case")
    return case


async def inject(fleet: Fleet, case: Case, name: str, other: str, ranks: Sequence[psutil.Process] = ()) -> None:
    """Do it to the process `name`; `other` is the peer of a pair, `ranks` are those of the process but for itself."""
    process = fleet.processes[name]
    match case.fault:
        case "kill" | "leader-kill":
            process.send(signal.SIGKILL)
        case "stop" | "leader-stop":
            process.send(signal.SIGSTOP)
        case "rank-kill":
            ranks[0].kill()
        case "rank-stop":
            ranks[0].suspend()
        case "restart":
            process.send(signal.SIGTERM)
        case "hang":
            process.send(signal.SIGUSR2)
        case "names":
            await hang_names(fleet, fleet.prefill)
        case "pair":
            prefill, decode = (other, name) if case.target == "decode" else (name, other)
            await fleet.mode("cut", f"kv-{prefill}", peer=decode)
        case "cut" | "slow":
            for link, peer in fleet.links_of(name):
                rate = SLOW_RATES.get(link.partition("-")[0], SLOW_CONTROL_RATE)
                await fleet.mode(case.fault, link, peer=peer, rate=rate)
        case "reset":
            await _break_sessions(fleet, name, 0)


async def hold(fleet: Fleet, case: Case, name: str, seconds: float) -> None:
    """Let the fault last; sessions break again and again meanwhile, while both ends live."""
    if case.fault != "reset":
        await asyncio.sleep(seconds)
        return
    for turn in range(1, RESETS):
        await _break_sessions(fleet, name, turn)
        await asyncio.sleep(seconds / (RESETS - 1))


async def hang_names(fleet: Fleet, prefill: Collection[str]) -> None:
    """Let look-ups of names hang in these prefill workers, and break their connections to Redis."""
    for name in prefill:
        fleet.processes[name].send(signal.SIGUSR1)
        await fleet.abort(f"redis-{name}")


def resolve_names(fleet: Fleet) -> None:
    """Let names resolve again."""
    for name in fleet.prefill:
        fleet.processes[name].send(signal.SIGALRM)


async def _break_sessions(fleet: Fleet, first: str, turn: int) -> None:
    names = fleet.decode if first in fleet.decode else fleet.prefill
    hit = names[(names.index(first) + turn) % len(names)]
    for link in fleet.links.values():
        if link.ends[0] in fleet.routers and link.ends[1] == hit:
            await fleet.abort(link.name)


async def heal(fleet: Fleet, case: Case, name: str) -> str:
    """Undo it, and wait until the process serves; what went wrong, in words, or ""."""
    process, trouble = fleet.processes[name], ""
    match case.fault:
        case "kill" | "leader-kill":
            await process.ended()
            await fleet.restart(name)
        case "rank-kill" | "rank-stop":
            code = await process.ended()
            if code != 1:
                trouble = f"{name} ended with status {code} after the end of a rank"
                await process.kill()
            await fleet.restart(name)
        case "stop" | "leader-stop":
            process.send(signal.SIGCONT)
        case "names":
            resolve_names(fleet)
        case "hang":
            code = await process.ended()
            if code != 1:
                trouble = f"{name} ended with status {code} after its engine hung"
                await process.kill()
            await fleet.restart(name)
        case "restart":
            code = await process.ended()
            if code is None:
                trouble = f"{name} did not end after SIGTERM"
                await process.kill()
            elif code != 0:
                trouble = f"{name} ended with status {code} after SIGTERM"
            await fleet.restart(name)
    await fleet.heal_links()
    return trouble


async def prepare(fleet: Fleet, case: Case) -> None:
    """Slow the KV links where a transfer is to be hit."""
    if case.state == "transferring":
        rate = TRANSFER_RATE * (REAL_TOKEN_BYTES // TOKEN_BYTES if fleet.shape.real else 1)
        for name in fleet.prefill:
            await fleet.mode("slow", f"kv-{name}", rate=rate)


async def ease(fleet: Fleet, case: Case, name: str) -> None:
    """Let links that `prepare` slowed pass again, but for those that the fault concerns."""
    await asyncio.sleep(1.0)
    if case.state == "transferring" and case.fault in ("kill", "stop", "reset", "restart", *RANK_FAULTS):
        for each in fleet.prefill:
            await fleet.mode("pass", f"kv-{each}")
