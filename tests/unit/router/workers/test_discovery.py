"""Discovery of workers."""

import asyncio
import logging

import pytest

from baton.errors import ConfigError
from router.workers.discovery import Discovery


async def test_static_addresses_are_told_once() -> None:
    found: list[set[str]] = []
    await Discovery("--decode", ["a:1", "b:2"], 0.1, found.append).run()
    assert found == [{"a:1", "b:2"}]


async def test_names_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | OSError] = [["10.0.0.1", "10.0.0.2"], OSError("no answer"), ["10.0.0.2", "fd00::3"]]
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    async def getaddrinfo(host: str, port: int, **kind: int) -> list[tuple[object, ...]]:
        assert (host, port) == ("decode", 7000)
        answer = answers.pop(0)
        if not answers:
            answers.append(answer)
            asked.set()
        if isinstance(answer, OSError):
            raise answer
        return [(0, 0, 0, "", (address, port)) for address in answer]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    found: list[set[str]] = []
    task = asyncio.create_task(Discovery("--decode", ["dns:///decode:7000", "a:1"], 0.01, found.append).run())
    await asyncio.wait_for(asked.wait(), 60)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    # A failed look-up keeps what is known.
    first, later = {"10.0.0.1:7000", "10.0.0.2:7000"}, {"10.0.0.2:7000", "[fd00::3]:7000"}
    assert found == [{"a:1"}, {"a:1", *first}, {"a:1", *later}]


async def test_a_name_whose_look_up_hangs_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(host: str, port: int, **kind: int) -> list[tuple[object, ...]]:
        if host == "hangs":
            await asyncio.Event().wait()
        return [(0, 0, 0, "", ("10.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    found: asyncio.Queue[set[str]] = asyncio.Queue()
    targets = ["dns:///hangs:1", "dns:///decode:7000", "a:1"]
    task = asyncio.create_task(Discovery("--decode", targets, 0.01, found.put_nowait).run())
    async with asyncio.timeout(60):
        assert await found.get() == {"a:1"}
        assert await found.get() == {"a:1", "10.0.0.1:7000"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_look_up_that_fails_unexpectedly_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problems = [RuntimeError("can't start new thread"), None, None]

    async def getaddrinfo(host: str, port: int, **kind: int) -> list[tuple[object, ...]]:
        if problems and (problem := problems.pop(0)):
            raise problem
        return [(0, 0, 0, "", ("10.0.0.1", port))]

    found: asyncio.Queue[set[str]] = asyncio.Queue()

    def dial(addresses: set[str]) -> None:
        if problems:
            raise RuntimeError("no channel")
        found.put_nowait(addresses)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    task = asyncio.create_task(Discovery("--decode", ["dns:///decode:7000"], 0.001, dial).run())
    assert await asyncio.wait_for(found.get(), 60) == {"10.0.0.1:7000"}
    assert [record.exc_text.splitlines()[-1] for record in caplog.records] == [
        "RuntimeError: can't start new thread",
        "RuntimeError: no channel",
    ]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("target", ["dns:///a..b:7000", f"{'x' * 64}:7000"])
def test_names_that_can_not_be_looked_up_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"--prefill: .* names no host: .*label"):
        Discovery("--prefill", [target, "127.0.0.1:7000"], 5, lambda addresses: None)


@pytest.mark.parametrize("target", ["nowhere", "dns:///x", "a:99999"])
def test_bad_targets_are_named(target: str) -> None:
    with pytest.raises(ConfigError, match=f"--decode: must be HOST:PORT .*{target.removeprefix('dns:///')}"):
        Discovery("--decode", [target], 5, lambda addresses: None)


async def test_a_name_without_workers_yet_is_told_once_and_is_a_warning_only_when_it_had_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked, known = 0, {3, 4}

    async def getaddrinfo(*_: object, **kind: object) -> list[tuple[object, ...]]:
        nonlocal asked
        asked += 1
        if asked not in known:
            raise OSError("no such name")
        return [(0, 0, 0, "", ("10.0.0.1", 7000))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    task = asyncio.create_task(Discovery("--decode", ["dns:///decode:7000"], 0.001, lambda _: None).run())
    while asked < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [record.levelname for record in caplog.records if "decode:7000" in record.message] == ["INFO", "WARNING"]
