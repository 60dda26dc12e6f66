"""A request with more choices than a worker has slots, beside requests of others, in a whole fleet."""

import asyncio
from pathlib import Path

from baton import AsyncClient, bundled, keys
from baton.completion import Completion
from baton.engine.fake import FakeEngine, expected_tokens
from baton.request import SamplingParams
from tests.decoding import LoggingEngine
from tests.fleet import SECRET, Fleet, serving

SLOTS, CHOICES = 32, 33
WAIT_S = 120.0
"""Only what hangs takes so long."""


class Asked:
    def __init__(self, client: AsyncClient, prompt: list[int], max_tokens: int, n: int) -> None:
        self.prompt, self.params = prompt, SamplingParams(max_tokens=max_tokens, seed=11, n=n)
        self.begun = asyncio.Event()
        self.done = Completion()
        self.task = asyncio.create_task(self._run(client))

    async def _run(self, client: AsyncClient) -> None:
        first: set[int] = set()
        asked = self.params
        stream = client.generate(self.prompt, timeout=WAIT_S, max_tokens=asked.max_tokens, seed=asked.seed, n=asked.n)
        async for delta in stream:
            self.done.add(delta)
            first.add(delta.index)
            if len(first) == self.params.n:
                self.begun.set()

    async def starts(self) -> None:
        """Wait for the first token of every choice; raises what ended the request before."""
        begun = asyncio.create_task(self.begun.wait())
        await asyncio.wait((self.task, begun), return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            self.task.result()

    def expected(self) -> list[list[int]]:
        """The tokens of each choice, which depend on nothing but the prompt, the seed and the choice's index."""
        count = self.params.max_tokens or 0
        choices = range(self.params.n)
        return [expected_tokens(self.prompt, count, params=self.params, choice_index=each) for each in choices]


async def test_a_request_with_more_choices_than_slots_keeps_nobody_from_a_first_token(tmp_path: Path) -> None:
    """While no step ends, a request of 33 choices starts beside a running one, and so does one that comes after it."""
    file = tmp_path / "keys.json"
    tenants = [keys.add(file, tenant=tenant) for tenant in ("many", "other")]
    engine = LoggingEngine(page_size=16, pages=512, slots=SLOTS)
    async with asyncio.timeout(WAIT_S), Fleet(bundled.path()) as fleet:
        prefill = await fleet.prefill(engine=FakeEngine())
        decode = await fleet.decode(engine=engine, stall_s=WAIT_S)
        app = await fleet.start_router([prefill], [decode], api_keys=str(file), fleet_secret=SECRET)
        await serving(app.address)
        engine.gate.clear()
        async with AsyncClient(app.address, api_key=tenants[0]) as a, AsyncClient(app.address, api_key=tenants[1]) as b:
            asked = []
            for client, prompt, tokens, n in ((b, [5, 7], 20, 1), (a, [3, 1, 4, 1, 5], 20, CHOICES), (b, [2, 7], 4, 1)):
                asked.append(Asked(client, prompt, tokens, n))
                await asked[-1].starts()
            assert len(engine.steps) <= 1
            engine.gate.set()
            await asyncio.gather(*(each.task for each in asked))
        for each in asked:
            assert [choice.token_ids for choice in each.done.choices] == each.expected()
        # One prefill and one transfer served all choices.
        assert asked[1].done.usage.prompt_tokens == 5
        assert max(map(len, engine.steps)) <= SLOTS
