"""A fleet whose decode worker launches each step before the tokens of the last one are read."""

from __future__ import annotations

import asyncio
import random

from baton import bundled
from baton.engine.fake import FakeEngine, expected_tokens
from baton.request import SamplingParams
from tests.fleet import Fleet

VOCABULARY = 1000


async def test_answers_are_those_of_single_steps_however_sequences_end() -> None:
    engine = FakeEngine(pages=24, slots=3, steps_ahead=1, step_time=0.001)
    async with Fleet(bundled.path()) as fleet:
        prefill = await fleet.prefill(engine=FakeEngine())
        decode = await fleet.decode(engine=engine)
        client = await fleet.router([prefill], [decode])
        chosen = random.Random(7)

        async def ask(number: int) -> None:
            prompt = [chosen.randrange(VOCABULARY) for _ in range(chosen.randint(1, 60))]
            tokens, params = chosen.randint(1, 90), SamplingParams(temperature=0.0)
            if number % 3 == 1:
                params = SamplingParams(temperature=1.0, seed=number)
            expected = expected_tokens(prompt, tokens, params=params)
            # A token that ends some of them early.
            stop = expected[tokens // 2] if number % 2 else VOCABULARY - 1
            last = expected.index(stop) + 1 if stop in expected else tokens
            done = await client.complete(
                prompt,
                max_tokens=tokens,
                temperature=params.temperature,
                seed=params.seed,
                stop_token_ids=(stop,),
                timeout=60,
            )
            assert done.token_ids == expected[:last]

        async def leave(number: int) -> None:
            stream = client.generate([number], max_tokens=300, temperature=0, timeout=60)
            async for _ in stream:
                break
            await stream.aclose()

        await asyncio.gather(*(ask(number) for number in range(24)), *(leave(number) for number in range(4)))
