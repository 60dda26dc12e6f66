"""`python -m tests.chaos.trickle ADDRESS RATE SEED`: small requests at a steady rate, until its input is closed.

A process of its own, so that what the load generator of a flood costs is not measured. The API key is BATON_API_KEY.
It writes an empty line when it begins, and at the end a line of JSON for each request: when it was sent and when its
first token came, on the monotonic clock, which all processes of a machine share, how it ended, and what was wrong.
"""

import asyncio
import json
import os
import random
import sys
import time

from baton.client import AsyncClient
from tests.chaos.load import Load, Mix, Outcome

PROMPT, TOKENS = 30, 4
"""A chunk each: at 8 a second about half of a fair share of two prefill workers. No fair queue is quick beyond that."""
END_BOUND_S = 60.0


def line(outcome: Outcome) -> str:
    fields = {"sent": outcome.sent, "first": outcome.first, "end": outcome.end, "error": outcome.error}
    return json.dumps(fields)


async def run(address: str, rate: float, seed: int) -> None:
    """Send until the input is closed, then wait for what is under way."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    closed = asyncio.create_task(reader.read())
    async with AsyncClient(address, api_key=os.environ["BATON_API_KEY"]) as client:
        load = Load({"": client}, Mix(rng), rng)
        print(flush=True)
        due = time.monotonic()
        while not closed.done():
            load.send(load.mix.plain(PROMPT, TOKENS), "")
            due += 1 / rate
            await asyncio.wait({closed}, timeout=max(0.0, due - time.monotonic()))
        await load.finish(END_BOUND_S)
    for outcome in load.outcomes:
        print(line(outcome))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
