"""Processes that tokenize: the same ids as in this process, and a clear error however a process ends."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from baton.errors import EngineError, Unavailable
from baton.model.checkpoint import tokenizer_digest
from baton.tokenizer import Tokenizer
from router.serving import tokenizer_processes
from router.serving.tokenizer_processes import TokenizerProcesses
from tests.integration.router_stubs import checkpoint

WAIT_S = 60
TEXTS = ["x", "größe 日本 \U0001f600", "a long text " * 15_000]
"""The last one is more than a pipe holds."""


class Watched(TokenizerProcesses):
    """Notes which processes are taken, and tells when one has a text and is waited for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, tokenizer_digest(folder), Tokenizer.load(folder))
        self.taken: list[subprocess.Popen[bytes]] = []
        self.waiting = threading.Event()

    def _take(self) -> subprocess.Popen[bytes] | None:
        if (process := super()._take()) is not None:
            self.taken.append(process)
        return process


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(checkpoint(tmp_path))
    receive = tokenizer_processes._receive

    def watched(*arguments: Any) -> bytearray:
        made.waiting.set()
        return receive(*arguments)

    monkeypatch.setattr(tokenizer_processes, "_receive", watched)
    yield made
    made.close()
    assert all(process.poll() is not None and process.stdin and process.stdin.closed for process in made.taken)


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_the_tokenizer_and_of_one_process(processes: Watched, tmp_path: Path, special: bool) -> None:
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        found = processes.encode(text.encode(), add_special_tokens=special)
        assert list(found) == tokenizer.encode(text, add_special_tokens=special)
    assert len(set(processes.taken)) == 1


@pytest.mark.parametrize("end", ["kill", "close"])
def test_the_end_of_a_process_ends_its_text_with_an_error(processes: Watched, end: str) -> None:
    processes.encode(b"x", add_special_tokens=True)
    process = processes.taken[0]
    os.kill(process.pid, signal.SIGSTOP)
    processes.waiting.clear()
    error = {
        "kill": "the process that tokenized the text ended with status -9; try again",
        "close": "the router is stopping, and the text is not tokenized",
    }[end]
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(processes.encode, b"y", add_special_tokens=True)
        assert processes.waiting.wait(WAIT_S)
        (process.kill if end == "kill" else processes.close)()
        with pytest.raises(Unavailable, match=f"^{error}$"):
            answer.result(WAIT_S)
    if end == "kill":
        assert len(processes.encode(b"xyz", add_special_tokens=False)) == 3
        assert len(set(processes.taken)) == 2
    else:
        with pytest.raises(Unavailable, match=f"^{error}$"):
            processes.encode(b"x", add_special_tokens=True)


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_process_that_is_silent_is_replaced(processes: Watched, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    processes.encode(b"x", add_special_tokens=True)
    os.kill(processes.taken[0].pid, signal.SIGSTOP)
    with monkeypatch.context() as short:
        short.setattr(tokenizer_processes, "_MIN_LIMIT_S", 0.1)
        short.setattr(tokenizer_processes, "_MIN_BYTES_PER_S", 1e9)
        with pytest.raises(Unavailable, match=f"tokenizes {size} bytes of text did not answer within 0 s; try again$"):
            processes.encode(b"x" * size, add_special_tokens=True)
    assert processes.taken[0].returncode == -signal.SIGKILL
    assert len(processes.encode(b"xy", add_special_tokens=False)) == 2
    assert len(set(processes.taken)) == 2


def test_without_a_process_the_router_tokenizes_itself(processes: Watched, caplog: pytest.LogCaptureFixture) -> None:
    command, processes._command = processes._command, ["/nowhere"]
    for text in TEXTS:
        found = processes.encode(text.encode(), add_special_tokens=True)
        assert list(found) == processes._tokenizer.encode(text)
    (warning,) = caplog.messages
    assert warning.startswith("no process to tokenize long texts can be started ([Errno 2]")
    processes._command = command
    assert len(processes.encode(b"xy", add_special_tokens=False)) == 2
    assert len(processes.taken) == 1


def test_a_process_that_died_while_idle_costs_no_request(processes: Watched) -> None:
    processes.encode(b"x", add_special_tokens=True)
    processes.taken[0].kill()
    processes.taken[0].wait(WAIT_S)
    assert len(processes.encode(b"xy", add_special_tokens=False)) == 2


def test_texts_at_the_same_time_have_processes_of_their_own(processes: Watched) -> None:
    with ThreadPoolExecutor(3) as threads:
        texts = [str(number).encode() * 100_000 for number in range(6)]
        found = list(threads.map(lambda text: processes.encode(text, add_special_tokens=False), texts))
    assert [len(set(ids)) for ids in found] == [1] * 6
    assert len({ids[0] for ids in found}) == 6
    assert len(set(processes.taken)) <= 3


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_an_idle_process_keeps_no_memory_of_its_last_text_and_has_one_thread(processes: Watched) -> None:
    def resident_mib() -> int:
        return (
            int(Path(f"/proc/{processes.taken[0].pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
        )

    processes.encode(b"x", add_special_tokens=True)
    before = resident_mib()
    processes.encode(b"a long text " * 100_000, add_special_tokens=True)
    # It is idle again when it has answered the next one.
    processes.encode(b"x", add_special_tokens=True)
    assert resident_mib() < before + 50
    # The library panics where it may not start threads.
    assert len(list(Path(f"/proc/{processes.taken[0].pid}/task").iterdir())) == 1


@pytest.mark.parametrize("change", ["folder is gone", "tokenizer is another"])
def test_texts_are_tokenized_in_the_router_when_the_checkpoint_has_changed(
    processes: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    if change == "folder is gone":
        shutil.rmtree(tmp_path)
    else:
        with (tmp_path / "tokenizer.json").open("a") as file:
            file.write("\n")
    for text in TEXTS:
        found = processes.encode(text.encode(), add_special_tokens=True)
        assert list(found) == processes._tokenizer.encode(text)
    (warning,) = caplog.messages
    assert "(it ended with status 1 before it was ready); the router does it itself" in warning
    assert not processes.taken


def test_a_text_that_the_tokenizer_refuses_ends_with_its_error_and_the_process_goes_on(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    words = tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    made = Watched(tmp_path)
    with pytest.raises(EngineError, match=r"can't be tokenized: .*UNK"):
        made.encode(b"a b", add_special_tokens=False)
    assert list(made.encode(b"a a", add_special_tokens=False)) == [0, 0]
    assert len(set(made.taken)) == 1
    made.close()


def test_a_process_survives_sigterm_and_imports_nothing_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "array.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    made = Watched(checkpoint(tmp_path))
    made.encode(b"x", add_special_tokens=False)
    made.taken[0].terminate()
    assert len(made.encode(b"xy", add_special_tokens=False)) == 2
    assert made.taken[0] is made.taken[1]
    made.close()


def test_a_process_ends_with_its_standard_input(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    command = [sys.executable, "-m", tokenizer_processes.__name__, str(folder), tokenizer_digest(folder)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=WAIT_S).returncode == 0
