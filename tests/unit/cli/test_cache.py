"""`baton cache`: the tiers of processes over real gRPC, what is cleared, and prompts sent to fill them."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from baton import AsyncClient
from baton.cli.main import main
from baton.errors import InvalidRequest, Overloaded, Unsupported
from baton.ledger import CacheReport, CacheTier, Ledger
from baton.pb import inference_pb2 as pb
from baton.rpc.admin import ADMIN_SERVICE, AdminSources, add_admin
from baton.rpc.server import Listener, listen
from tests.fake_router import Router
from tests.fake_router import served as router_served

POOL = CacheTier("pool", 4, 4096, 1 << 20, 7, 3)
REDIS = CacheTier("redis", 9, 9 << 20, 0, 1, 2, 1.5 * (1 << 30), "out of reach: timeout")


class Process:
    """A worker, or a router, with tiers and a note of what it was told to clear."""

    def __init__(self, role: str, tiers: Sequence[CacheTier] = (POOL, REDIS)) -> None:
        self.tiers = tiers
        self.cleared: list[bool] = []
        self.dropped = [CacheTier("pool", 4, 4096)]
        clear = None if role == "router" else self.clear
        self.sources = AdminSources(f"{role}-1", role, self.ledger, self.cache, clear)

    async def ledger(self) -> Ledger:
        return Ledger(self.sources.process, self.sources.role)

    async def cache(self) -> Sequence[CacheTier]:
        return self.tiers

    async def clear(self, shared: bool) -> Sequence[CacheTier]:
        self.cleared.append(shared)
        return self.dropped


@asynccontextmanager
async def served(process: Process, **keywords: Any) -> AsyncIterator[Listener]:
    def add(server: grpc.aio.Server) -> None:
        add_admin(server, process.sources)

    async with listen("127.0.0.1:0", insecure=False, add=add, services=[ADMIN_SERVICE], **keywords) as listener:
        yield listener


async def cache(*arguments: str, typed: str = "") -> Result:
    invoke = partial(CliRunner().invoke, main, ["cache", *arguments], env={"COLUMNS": "80"}, input=typed)
    return await asyncio.to_thread(invoke)


async def test_the_report_of_a_process_about_its_cache_comes_back_as_it_was() -> None:
    async with served(Process("decode")) as listener, AsyncClient(listener.address) as client:
        assert await client.cache() == CacheReport("decode-1", "decode", (POOL, REDIS))
        assert await client.clear_cache() == (CacheTier("pool", 4, 4096),)


async def test_a_router_has_nothing_to_clear_and_says_so() -> None:
    async with served(Process("router", [CacheTier("index", 3)])) as listener, AsyncClient(listener.address) as client:
        assert (await client.cache()).tiers == (CacheTier("index", 3),)
        with pytest.raises(Unsupported, match=r"^router router-1 caches no KV, only its workers do$"):
            await client.clear_cache(redis=True)
        result = await cache("clear", f"--target={listener.address}", "--yes")
    assert result.exit_code == 1
    assert (
        result.stderr
        == f"error: {listener.address}: UNIMPLEMENTED: router router-1 caches no KV, only its workers do\n"
    )


async def test_stats_tells_of_each_tier_of_each_process() -> None:
    async with served(Process("prefill")) as prefill, served(Process("decode", [POOL])) as decode:
        listed = await cache("stats", f"--target={prefill.address},{decode.address}", "--json")
        table = await cache("stats", f"--target={prefill.address}", f"--target={decode.address}")
    answers = json.loads(listed.stdout)
    assert [answer["process"] for answer in answers] == ["prefill-1", "decode-1"]
    assert answers[0]["tiers"][1]["misses"] == 2
    # A title and a head for each, and a line for each tier.
    assert len(table.stdout.splitlines()) == 2 * 2 + 3


@pytest.mark.parametrize(("typed", "cleared"), [("y\n", [False]), ("n\n", []), ("", [])])
async def test_clear_asks_first(typed: str, cleared: list[bool]) -> None:
    process = Process("prefill")
    async with served(process) as listener:
        result = await cache("clear", f"--target={listener.address}", typed=typed)
    assert f"Drop the cached KV of {listener.address}? [y/N]" in result.stderr
    assert (result.exit_code, process.cleared) == (0 if cleared else 1, cleared)


async def test_clear_reaches_redis_only_when_asked_to_and_says_what_went() -> None:
    processes = [Process("prefill"), Process("decode")]
    async with served(processes[0]) as prefill, served(processes[1]) as decode:
        targets = [f"--target={listener.address}" for listener in (prefill, decode)]
        plain = await cache("clear", targets[0], "--yes")
        redis = await cache("clear", *targets, "--yes", "--redis", "--json")
        asked = await cache("clear", targets[0], "--redis")
    assert [process.cleared for process in processes] == [[False, True], [True]]
    assert plain.stdout.splitlines()[-1].split() == ["pool", "4", "4", "KiB"]
    assert [each["tiers"][0]["blocks"] for each in json.loads(redis.stdout)] == [4, 4]
    assert "and all of its kind in Redis?" in asked.stderr


async def test_clear_fails_where_something_stays() -> None:
    """Blocks that must not be cached are still there, and a script has to know."""
    process = Process("prefill")
    process.dropped = [CacheTier("pool", 4, 4096), CacheTier("redis", state="not all of it; out of reach: timeout")]
    async with served(process) as listener:
        result = await cache("clear", f"--target={listener.address}", "--yes", "--redis")
    assert result.exit_code == 1
    assert result.stderr == "error: prefill prefill-1: redis: not all of it; out of reach: timeout\n"


class Slow(Process):
    """Clears until it has been asked `asked` times how far it has come; then answers no more, if so told."""

    def __init__(self, asked: int, *, falls_silent: bool = False) -> None:
        super().__init__("prefill")
        self.left, self.falls_silent = asked, falls_silent
        self.over, self.cancelled = asyncio.Event(), asyncio.Event()

    async def cache(self) -> Sequence[CacheTier]:
        if self.left == 0:
            await asyncio.Event().wait()
        if not self.cleared:
            return [POOL]
        self.left -= 1
        if not self.left and not self.falls_silent:
            self.over.set()
        return [POOL, CacheTier("redis", 9, state=f"clearing: {7 - self.left} blocks are gone")]

    async def clear(self, shared: bool) -> Sequence[CacheTier]:
        self.cleared.append(shared)
        try:
            await self.over.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return [CacheTier("redis", 7, 4096)]


async def test_a_long_clear_tells_how_far_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has the time of --timeout, all of it may take several times as much."""
    monkeypatch.setattr("baton.cli.cache._PROGRESS_S", 0.3)
    process = Slow(asked=5)
    async with served(process) as listener:
        result = await cache("clear", f"--target={listener.address}", "--yes", "--redis", "--timeout=1", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines() == [
        f"prefill prefill-1: redis: clearing: {gone} blocks are gone" for gone in range(3, 8)
    ]
    assert json.loads(result.stdout)[0]["tiers"][0]["blocks"] == 7


async def test_a_clear_of_a_process_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cli.cache._PROGRESS_S", 0.05)
    process = Slow(asked=1, falls_silent=True)
    async with served(process) as listener, asyncio.timeout(60):
        result = await cache("clear", f"--target={listener.address}", "--yes", "--redis", "--timeout=0.3")
        await process.cancelled.wait()
    assert result.exit_code != 0
    assert f"error: {listener.address}: " in result.stderr


async def test_an_unreachable_process_exits_75_and_a_bad_flag_exits_2() -> None:
    assert (await cache("stats", "--target=127.0.0.1:1")).exit_code == 75
    assert (await cache("clear", "--yes")).exit_code == 2
    assert (await cache("stats", "--target=nowhere")).exit_code == 2
    assert (await cache("warm")).exit_code == 2


async def warm(router: Router, file: Path, *flags: str) -> Result:
    async with router_served(router) as listener:
        return await cache("warm", f"--target={listener.address}", f"--prompt-file={file}", *flags)


async def test_warm_sends_each_line_for_one_token_and_says_what_was_cached(tmp_path: Path) -> None:
    router, file = Router(), tmp_path / "prompts.jsonl"
    lines = [{"text": "a\u2028b"}, {"token_ids": [1, 2]}, {"messages": [{"role": "user", "content": "hi"}]}]
    file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    result = await warm(router, file, "--cache-salt=s", "--concurrency=1", "--model=tiny")
    assert result.exit_code == 0, result.stderr
    assert [(r.sampling.max_tokens, r.cache_salt, r.cache, r.model) for r in router.seen] == [
        (1, "s", pb.CACHE_POLICY_READ_WRITE, "tiny")
    ] * 3
    assert [r.WhichOneof("prompt") for r in router.seen] == ["text", "token_ids", "chat"]
    assert router.seen[0].text == "a\u2028b"
    said = "3 tokens, 1 computed, 2 cached: 1 from pool, 1 from Redis; 2 held by decode"
    assert result.stdout.splitlines() == [
        *(f"prompt {line}: {said}" for line in (1, 3, 5)),
        "3 prompts: 9 tokens, 3 computed, 6 cached",
    ]


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", '{"text": "hi"}'), ("a.txt", "hi")])
async def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path, name: str, content: str) -> None:
    router, file = Router(), tmp_path / name
    file.write_text(content, encoding="utf-8-sig")
    assert (await warm(router, file)).exit_code == 0
    assert router.seen[0].text == "hi"


async def test_a_text_file_is_one_prompt_and_json_tells_all(tmp_path: Path) -> None:
    router, file = Router(), tmp_path / "system.txt"
    file.write_text("line 1\nline 2\n", encoding="utf-8")
    (answer,) = json.loads((await warm(router, file, "--json")).stdout)
    assert router.seen[0].text == "line 1\nline 2\n"
    assert (answer["line"], answer["usage"]["cached"]["redis"], answer["error"]) == (1, 1, None)


async def test_as_many_prompts_as_were_allowed_are_sent_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "x"}\n' * 9)
    router = Counting()
    result = await warm(router, file, "--concurrency=3")
    assert (result.exit_code, len(router.seen), router.most) == (0, 9, 3)


class Counting(Router):
    """Answers three at once, and notes how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._there, self._full = 0, 0, asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self._there += 1
        self.most = max(self.most, self._there)
        if self._there == 3:
            self._full.set()
        await self._full.wait()
        async for answer in super().Generate(request, context):
            yield answer
        self._there -= 1


async def test_a_prompt_that_fails_does_not_stop_the_others_and_sets_the_status(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "x"}\n{"text": "refuse"}\n{"text": "y"}\n')
    router = Picky()
    result = await warm(router, file)
    assert result.exit_code == 75
    assert result.stderr == "prompt 2: error: RESOURCE_EXHAUSTED: the queue is full\n"
    assert result.stdout.splitlines()[-1] == "3 prompts, 1 failed: 6 tokens, 2 computed, 4 cached"
    answers = json.loads((await warm(Picky(), file, "--json")).stdout)
    assert [answer["error"] for answer in answers] == [None, "RESOURCE_EXHAUSTED: the queue is full", None]
    file.write_text('{"text": "refuse"}\n{"text": "bad"}\n')
    assert (await warm(Picky(), file)).exit_code == 1


class Picky(Router):
    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        if request.text == "refuse":
            raise Overloaded("the queue is full")
        if request.text == "bad":
            raise InvalidRequest("text", "is bad")
        async for answer in super().Generate(request, context):
            yield answer


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: prompt: is not JSON: "),
        ("[1, 2]", "line 2: prompt: must be an object with one of text, token_ids, messages, got [1, 2]"),
        ('{"text": "x", "token_ids": [1]}', "line 2: prompt: must be an object with one of"),
        ('{"text": ""}', "line 2: text: must be a text that is not empty, got ''"),
        ('{"token_ids": [1, -5]}', "line 2: token_ids[1]: "),
        ('{"token_ids": [{"role": "user", "content": "x"}]}', "line 2: token_ids: must be a list of token ids"),
        ('{"messages": [5]}', "line 2: messages: must be a list of {role, content}"),
        ('{"messages": [{"role": "user"}]}', "line 2: prompt[0]: must have role and content"),
        ("[" * 100_000, "line 2: prompt: is not JSON: "),
    ],
)
async def test_a_bad_line_is_refused_by_its_number_before_any_is_sent(line: str, words: str, tmp_path: Path) -> None:
    router, file = Router(), tmp_path / "prompts.jsonl"
    file.write_text('{"text": "x"}\n' + line)
    result = await warm(router, file)
    said = " ".join(result.stderr.split())
    assert (result.exit_code, router.seen) == (2, [])
    assert "'--prompt-file': " in said
    assert words in said


async def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", "\n \n"), ("a.txt", "")):
        (tmp_path / name).write_text(content)
        result = await warm(Router(), tmp_path / name)
        assert result.exit_code == 2
        assert "holds no prompt" in result.stderr
    assert (await warm(Router(), tmp_path / "missing")).exit_code == 2
