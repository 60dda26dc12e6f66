"""Processes of benches: questions and answers over pipes, who runs when, words of those that fail."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.children import Child, ChildFailed, child, pinned
from bench.peers.processes import RUNNERS, runner

STUB = f"""
import os, sys
sys.path.insert(0, {str(RUNNERS)!r})
from protocol import serve

def decode(batch, context, steps):
    print("what a library says")
    os.write(1, b"and its C part\\n")
    return {{"seconds": batch * context * steps}}

def die():
    print("last words", file=sys.stderr)
    os._exit(3)

commands = {{"decode": decode, "die": die, "hang": sys.stdin.read}}
serve(lambda: ({{"version": "1"}}, commands))
"""


@pytest.fixture
def stub() -> Iterator[Child]:
    with runner("stub", [sys.executable, "-c", STUB]) as started:
        yield started


def stopped(process: Child) -> bool:
    # Returns once its state has changed; it stays a child that can be waited for.
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_runner_answers_between_what_libraries_print_and_is_stopped_while_it_is_not_asked(stub: Child) -> None:
    assert stopped(stub)
    assert stub.ask("decode", batch=2, context=3, steps=4) == {"seconds": 24}
    assert stopped(stub)
    with pytest.raises(ChildFailed, match="unexpected keyword argument 'nonsense'"):
        stub.ask("decode", nonsense=1)
    assert stub.ask("decode", batch=1, context=1, steps=1) == {"seconds": 1}


def test_a_runner_that_ends_is_told_with_the_end_of_its_output(stub: Child) -> None:
    for _ in range(2):
        with pytest.raises(ChildFailed, match="stub ended: last words"):
            stub.ask("die")


def test_a_child_tells_where_it_listens_and_all_that_it_says_then() -> None:
    code = "import os; print('listening a=h:1 b=h:2'); print(input(), os.sched_getaffinity(0)); print('end')"
    core = min(os.sched_getaffinity(0))
    with child([sys.executable, "-c", code], cores=[core]) as process:
        assert process.listening() == {"a": "h:1", "b": "h:2"}
        process._write(b"said\n")
        assert process.finish() == f"said {{{core}}}\nend\n"
    with pinned([core]):
        assert os.sched_getaffinity(0) == {core}
    with child([sys.executable, "-c", "raise SystemExit('a reason')"], name="it") as process:
        with pytest.raises(ChildFailed, match="it ended: a reason"):
            process.listening()
        with pytest.raises(ChildFailed, match="it ended with status 1: a reason"):
            process.finish()
