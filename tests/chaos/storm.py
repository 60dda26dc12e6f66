"""A storm: every few seconds a worker that is up is killed, frozen, or its engine hangs; at times a whole role is gone.

Workers that ended are started again a moment later, as `baton up` does; frozen ones go on. In the second half of the
storm the name of Redis does not resolve. Streams that were accepted must finish with exact tokens.
"""

import asyncio
import signal
import time

from tests.chaos.cases import hang_names, resolve_names
from tests.chaos.scene import Scene

STORM_S = 25.0
EVERY_S = (3.0, 4.0)
DOWN_S = (1.0, 3.0)
"""From a kill until the process is started again."""

FREEZE_S = (2.0, 9.0)
"""Both shorter and longer than the silence that counts as a loss."""

SAME_ROLE = 0.75
"""Probability that the role that was hit last is hit again."""

STREAMS, STREAM_TOKENS = 4, 300
"""Long streams that are sent before each blow."""

_SAMPLE_S = 0.05


async def storm(scene: Scene) -> float:
    """Hit and heal until the time is over and all are up again; when it began, on the monotonic clock."""
    fleet, rng, row = scene.fleet, scene.rng, scene.row
    up, blows, last = set(fleet.workers), {"kill": 0, "freeze": 0, "hang": 0}, ""

    async def kill(name: str) -> None:
        await fleet.processes[name].kill()
        await asyncio.sleep(rng.uniform(*DOWN_S))
        await fleet.restart(name)
        up.add(name)

    async def hang(name: str) -> None:
        fleet.processes[name].send(signal.SIGUSR2)
        code = await fleet.processes[name].ended()
        if code != 1:
            row.problems.append(f"{name} ended with status {code} after its engine hung")
            await fleet.processes[name].kill()
        await asyncio.sleep(rng.uniform(*DOWN_S))
        await fleet.restart(name)
        up.add(name)

    async def freeze(name: str) -> None:
        fleet.processes[name].send(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(*FREEZE_S))
        fleet.processes[name].send(signal.SIGCONT)
        up.add(name)

    gone = {"prefill": 0.0, "decode": 0.0}
    watching = asyncio.create_task(_watch(scene, up, gone))
    began, healing, resolves = time.monotonic(), [], True
    try:
        while time.monotonic() - began < scene.hold * STORM_S:
            if resolves and time.monotonic() - began > scene.hold * STORM_S / 2:
                resolves = False
                await hang_names(fleet, up & set(fleet.prefill))
            for _ in range(STREAMS):
                scene.load.send(scene.load.mix.plain(40, STREAM_TOKENS), rng.choice(fleet.routers))
            await asyncio.sleep(rng.uniform(*EVERY_S))
            if not up:
                continue
            same = sorted(name for name in up if name[0] == last)
            name = rng.choice(same if same and rng.random() < SAME_ROLE else sorted(up))
            up.discard(name)
            blow, last = rng.choice(("kill", "freeze", "hang")), name[0]
            blows[blow] += 1
            healing.append(asyncio.create_task({"kill": kill, "freeze": freeze, "hang": hang}[blow](name)))
        await asyncio.gather(*healing)
        resolve_names(fleet)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    row.hit, row.in_state = "workers", len(scene.load.in_flight())
    absent = ", ".join(f"no {role} worker for {seconds:.1f} s" for role, seconds in gone.items())
    row.note = f"{blows['kill']} kills, {blows['freeze']} freezes, {blows['hang']} hangs, {absent}"
    return began


async def _watch(scene: Scene, up: set[str], gone: dict[str, float]) -> None:
    """Add up the time in which a role has no worker that is up."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(_SAMPLE_S)
        now = time.monotonic()
        for role, names in (("prefill", scene.fleet.prefill), ("decode", scene.fleet.decode)):
            if up.isdisjoint(names):
                gone[role] += now - last
        last = now
