"""`python -m tests.chaos.soak`: overload, cancels and deaths for an hour; see `main` for what must hold.

    capacity measured ── 120% of it, 10% cancelled, a worker killed and restarted every minute ── all ended ── empty?

Resident memory of every process is sampled all the time. Flat means: the median of the last quarter is at most
`GROWTH` times that of the second, for the processes that were never killed; of workers, the last of each role is
spared for that.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.load import percentile
from tests.chaos import report
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.load import Load, Mix
from tests.chaos.observe import Leak, settle
from tests.chaos.runner import clients_of, describe, told

SHAPE = Shape(step_time=0.03, queue_capacity=32)
FACTOR = 1.2
KILL_S, DOWN_S, SAMPLE_S = 60.0, 2.0, 10.0
CALIBRATE_S, CALIBRATE_CLIENTS = 20.0, 40
END_BOUND_S, LEAK_BOUND_S = 90.0, 30.0
GROWTH = 1.1


class Tally(Load):
    """A load whose requests are counted when they end, and then forgotten."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.ended: Counter[str] = Counter()
        self.tokens = 0
        self.refusals: list[float] = []
        self.told: list[str] = []

    def _done(self, task: asyncio.Task[None]) -> None:
        outcome = self._tasks[task]
        super()._done(task)
        self.outcomes.remove(outcome)
        self.ended[outcome.end] += 1
        if outcome.end == "finished":
            self.tokens += outcome.received
        elif outcome.end == "refused":
            self.refusals.append(outcome.ended - outcome.sent)
        elif outcome.end in ("failed", "untyped", "wrong") and len(self.told) < 40:
            self.told.append(told(outcome))


class Soak:
    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.rng = random.Random(seed)
        self.samples: dict[str, list[int]] = {name: [] for name in fleet.processes}
        self.kills: Counter[str] = Counter()
        self.capacity = 0.0
        self.problems: list[str] = []

    async def run(self, seconds: float) -> tuple[Tally, Leak]:
        """Measure the capacity, then keep the fleet above it."""
        async with clients_of(self.fleet) as clients:
            self.capacity = await self._calibrate(Tally(clients, Mix(self.rng, cancels=0, deadlines=0), self.rng))
            print(f"capacity {self.capacity:.1f} requests/s", flush=True)
            load = Tally(clients, Mix(self.rng), self.rng)
            tasks = [
                asyncio.create_task(load.open_loop(FACTOR * self.capacity)),
                asyncio.create_task(self._sample(load)),
                asyncio.create_task(self._kill()),
            ]
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.problems += [f"the harness failed: {task.exception()!r}" for task in done]
            await self._all_up()
            for outcome in await load.finish(END_BOUND_S):
                self.problems.append(await describe(self.fleet, outcome))
            await asyncio.sleep(0)
        left, _ = await settle(self.fleet, LEAK_BOUND_S)
        return load, left

    async def _calibrate(self, load: Tally) -> float:
        """Requests per second that finish while there are always enough."""
        end = time.monotonic() + CALIBRATE_S

        async def client(router: str) -> None:
            while time.monotonic() < end:
                await asyncio.wait({load.start(load.mix.draw(), router)}, timeout=end - time.monotonic())

        routers = self.fleet.routers
        await asyncio.gather(*(client(routers[i % len(routers)]) for i in range(CALIBRATE_CLIENTS)))
        finished = load.ended["finished"]
        await load.finish(END_BOUND_S)
        return finished / CALIBRATE_S

    async def _sample(self, load: Tally) -> None:
        while True:
            for name, process in self.fleet.processes.items():
                self.samples[name].append(process.rss())
            megabytes = {name: values[-1] >> 20 for name, values in self.samples.items()}
            print(f"{dict(load.ended)} in flight {len(load.in_flight())} MiB {megabytes}", flush=True)
            await asyncio.sleep(SAMPLE_S)

    async def _kill(self) -> None:
        victims = [*self.fleet.prefill[:-1], *self.fleet.decode[:-1]]
        while True:
            await asyncio.sleep(KILL_S - DOWN_S)
            name = self.rng.choice(victims)
            self.kills[name] += 1
            await self.fleet.processes[name].kill()
            await asyncio.sleep(DOWN_S)
            await self.fleet.restart(name)

    async def _all_up(self) -> None:
        for name, process in self.fleet.processes.items():
            if not process.pid:
                if name not in self.kills:
                    self.problems.append(f"{name} ended by itself:\n{process.tail()}")
                await self.fleet.restart(name)

    def memory(self) -> list[tuple[str, float, float]]:
        """Of each process that was never killed, the medians of the second and of the last quarter, in MiB."""
        found = []
        for name, values in self.samples.items():
            quarter = len(values) // 4
            if quarter and name not in self.kills:
                medians = (
                    statistics.median(part) / 2**20 for part in (values[quarter : 2 * quarter], values[-quarter:])
                )
                found.append((name, *medians))
        return found  # type: ignore[return-value]


def page(soak: Soak, load: Tally, left: Leak, problems: list[str], *, seed: int, seconds: float) -> str:
    sent = sum(load.ended.values())
    refusals = load.refusals or [0.0]
    ends = ", ".join(f"{end} {count}" for end, count in load.ended.most_common())
    shares = ", ".join(f"p{round(100 * share)} {1e3 * percentile(refusals, share):.1f}" for share in (0.5, 0.99, 1.0))
    return "\n".join(
        [
            "# Soak",
            "",
            *report.heading(seed, seconds, soak.fleet.shape),
            f"- load: {FACTOR:.0%} of a measured capacity of {soak.capacity:.1f} requests/s, {seconds / 60:.0f} min",
            f"- kills: {dict(soak.kills)}",
            "",
            f"**{sent} requests: {ends}; hung {load.ended['hung']}, wrong {load.ended['wrong']}, leaked bytes "
            f"{left.bytes}.** Goodput {load.ended['finished'] / seconds:.1f} requests/s, {load.tokens / seconds:.0f} "
            f"tokens/s. Refusals came after {shares} ms.",
            "",
            "| process, never killed | MiB, second quarter | MiB, last quarter |",
            "|---|---|---|",
            *(f"| {name} | {early:.1f} | {late:.1f} |" for name, early, late in soak.memory()),
            "",
            *([f"- {problem}" for problem in problems] or ["No problems."]),
            "",
        ]
    )


async def run(arguments: argparse.Namespace, directory: Path) -> int:
    async with Fleet.running(SHAPE, directory) as fleet:
        soak = Soak(fleet, arguments.seed)
        load, left = await soak.run(60 * arguments.minutes)
        problems = soak.problems + load.told
        if not left.clean:
            problems += ["held after the end:", *left.violations, *left.lines, *left.silent]
        grown = [name for name, early, late in soak.memory() if late > GROWTH * early]
        problems += [f"{name} grew" for name in grown]
        text = page(soak, load, left, problems, seed=arguments.seed, seconds=60 * arguments.minutes)
    print(text)
    report.write("soak", text)
    bad = load.ended["hung"] + load.ended["wrong"] + load.ended["untyped"] + left.bytes + len(grown)
    return int(bool(bad or soak.problems or not left.clean))


def main() -> int:
    """The exit status: 1 when anything was hung, wrong, untyped or leaked, memory grew, or a process ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        return asyncio.run(run(arguments, Path(temporary)))


if __name__ == "__main__":
    sys.exit(main())
