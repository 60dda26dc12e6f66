"""The suite's own instruments: a proxy that really cuts, and an oracle that really tells right from wrong."""

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

from baton.request import FinishReason, TokenInfo, Usage
from tests.chaos.cases import CASES, DAMAGE, FLOODS, MIXED, RANKS, STORM, plan
from tests.chaos.load import Load, Mix, Outcome, Spec, pieces, tokenizer
from tests.chaos.proxy import Proxy


@contextlib.asynccontextmanager
async def echo(identify: bool = False) -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy with one link, "l", in front of a server that sends back what it gets."""

    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(back, "127.0.0.1", 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with Proxy() as proxy, server:
        upstream = server.sockets[0].getsockname()[1]
        await proxy.command({"op": "open", "link": "l", "listen": port, "upstream": upstream, "identify": identify})
        yield proxy, port


async def mode(proxy: Proxy, mode: str, **more: object) -> None:
    await proxy.command({"op": "mode", "link": "l", "mode": mode, **more})


async def ping(ends: tuple[asyncio.StreamReader, asyncio.StreamWriter], text: bytes = b"ping") -> bytes:
    """Answer to `text`; b"" if nothing comes for a while."""
    ends[1].write(text)
    try:
        return await asyncio.wait_for(ends[0].readexactly(len(text)), 0.3)
    except TimeoutError:
        return b""


async def test_a_cut_link_is_silent_and_delivers_what_was_under_way_once_it_is_healed() -> None:
    async with echo() as (proxy, port):
        old = await asyncio.open_connection("127.0.0.1", port)
        assert await ping(old) == b"ping"
        await mode(proxy, "cut")
        assert await ping(old, b"late") == b""
        new = await asyncio.open_connection("127.0.0.1", port)
        assert await ping(new, b"later") == b""
        await mode(proxy, "pass")
        assert await asyncio.wait_for(old[0].readexactly(4), 5) == b"late"
        assert await asyncio.wait_for(new[0].readexactly(5), 5) == b"later"


async def test_one_peer_is_cut_and_the_others_are_not() -> None:
    async with echo(identify=True) as (proxy, port):
        await proxy.command({"op": "pids", "pids": {"me": os.getpid()}})
        mine = await asyncio.open_connection("127.0.0.1", port)
        await mode(proxy, "cut", peer="another")
        assert await ping(mine) == b"ping"
        await mode(proxy, "cut", peer="me")
        assert await ping(mine) == b""
        await mode(proxy, "pass")
        assert await asyncio.wait_for(mine[0].readexactly(4), 5) == b"ping"


SPEC = Spec(prompt=(5, 7), max_tokens=3, n=2, seed=4)


def ended(end: str, *, change: int | None = None, drop: int = 0, finish: FinishReason = FinishReason.LENGTH) -> Outcome:
    """An outcome of SPEC; `change` alters a token of the last choice, `drop` leaves its last ones out."""
    outcome = Outcome(SPEC, "r0", 0.0, end=end)
    for choice in range(2):
        outcome.tokens[choice] = list(SPEC.expected(choice).tokens)
        outcome.texts[choice] = SPEC.expected(choice).text
        outcome.finish[choice] = finish
    if change is not None:
        outcome.tokens[1][change] += 1
    if drop:
        del outcome.tokens[1][-drop:]
    outcome.usage = Usage(len(SPEC.prompt), 0, outcome.received)
    outcome.judge()
    return outcome


def test_the_oracle_agrees_with_hand_made_numbers() -> None:
    # 1·5 + 2·7 + 1 + seed 4 = 24, then 5 + 14 + 3·24 + 2 + 4 = 97; choice 1 has one more of noise each time.
    assert SPEC.expected(0)[0][:2] == [24, 97]
    assert SPEC.expected(1)[0][0] == 25


def test_the_oracle_takes_tokens_that_a_real_engine_has_computed() -> None:
    spec = replace(SPEC, known=((8, 9, 10, 11), (12, 13, 14, 15)))
    assert [spec.expected(choice).tokens for choice in range(2)] == [[8, 9, 10], [12, 13, 14]]
    assert replace(spec, stop_token=13).expected(1)[:2] == ([12, 13], FinishReason.STOP)


def test_the_oracle_finds_what_is_wrong() -> None:
    assert ended("finished").end == "finished"
    assert ended("finished", change=2).end == "wrong"
    assert ended("finished", drop=1).end == "wrong"
    assert ended("finished", finish=FinishReason.STOP).end == "wrong"
    assert ended("cancelled", drop=2).end == "cancelled"
    assert ended("cancelled", change=0).end == "wrong"


async def test_a_request_without_an_end_is_hung() -> None:
    class Silent:
        async def generate(self, *_: object, **__: object) -> AsyncIterator[None]:
            await asyncio.Event().wait()
            yield None

    load = Load({"r0": Silent()}, Mix.__new__(Mix), None)  # type: ignore[dict-item, arg-type]
    outcome = load.send(SPEC, "r0")
    assert await load.finish(0.1) == [outcome]
    assert outcome.end == "hung"
    await asyncio.sleep(0)
    assert load.counts()["hung"] == 1


def test_the_oracle_knows_where_a_stop_string_ends_a_choice() -> None:
    spec = Spec(prompt=(5, 7), max_tokens=12, seed=4)
    tokens, _, text = spec.expected(0)
    made = pieces(tokens)
    assert "".join(made) == text == tokenizer().decode(tokens)
    # A stop string that begins in the text of the fifth token, or earlier, and ends in that of a later one.
    begins = len("".join(made[:5])) - 1
    stop = text[begins:]
    stopped = replace(spec, stop=stop, min_tokens=6).expected(0)
    assert stopped.finish is FinishReason.STOP
    assert stopped.text == text[:begins]
    first = text[0]
    assert replace(spec, stop=first).expected(0).text == ""
    assert len(replace(spec, stop=first, min_tokens=6).expected(0).tokens) > 6


def test_the_oracle_finds_wrong_text_and_wrong_log_probabilities() -> None:
    good = ended("finished")
    good.texts[1] += "!"
    good.judge()
    assert good.end == "wrong"
    told = Outcome(replace(SPEC, n=1, logprobs=2), "r0", 0.0)
    told.take(0, [TokenInfo(24, -1.0, ((24, -1.0), (25, -2.0)))], "", 1.0)
    assert not told.odd
    told.take(0, [TokenInfo(97, -2.0, ((97, -2.0), (99, -3.0)))], "", 2.0)
    assert told.odd


def test_every_case_is_planned_and_what_is_new_comes_early_and_again() -> None:
    planned = plan(random.Random(1))
    assert set(planned) == set(CASES) - set(RANKS) - set(MIXED)
    assert planned.count(STORM) > 3
    assert all(planned.count(case) == 2 for case in (DAMAGE, *FLOODS))
    assert {STORM, DAMAGE, *FLOODS} <= set(planned[:20])
