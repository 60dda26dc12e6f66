"""`baton demo`: one request through a whole fleet, on the bundled checkpoint.

Starts `baton up` as a process, completes a prompt twice (the second time with its prefix cached), stops the
fleet, and checks that no process is left. The exit status is 0 if all of that worked.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console

from baton.cli.generate import print_account
from baton.client import Client, Completion
from baton.errors import BatonError
from baton.process.supervisor import bind_to_parent
from baton.request import Sampling

_PROMPT = '''class Queue:
    """A queue that can be shared by several threads."""

    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self._lock = threading.Lock()

    def put(self, item):
        """Put an item into the queue."""
'''
_SAMPLING = Sampling(max_tokens=96, temperature=0.7, top_p=0.95, seed=2)
_STOP_S = 10.0


@click.command()
@click.option("--verbose", is_flag=True, help="Show the logs of the services.")
def demo(verbose: bool) -> None:
    """Complete a prompt through router, prefill and decode, and show the time of each step."""
    console = Console(highlight=False)
    level = "info" if verbose else "warning"
    # In float32 the second answer equals the first, although it begins with cached KV.
    flags = ["--grpc", "127.0.0.1:0", "--dtype", "float32", "--log-level", level]
    command = [sys.executable, "-m", "baton", "up", *flags]
    console.print("starting router, prefill, decode and Valkey …", style="dim")
    fleet = subprocess.Popen(bind_to_parent(command), stdout=subprocess.PIPE, text=True)
    problem = ""
    try:
        _complete_twice(console, _target(fleet))
    except BatonError as error:
        problem = f"{error.grpc_status}: {error}"
    except KeyboardInterrupt:
        problem = "interrupted"
    family = _descendants(fleet.pid)
    problem = _stop(fleet) or problem
    if left := [pid for pid in family if _alive(pid)]:
        problem = f"processes are left: {left}"
    if problem:
        click.echo(f"error: {problem}", err=True)
        sys.exit(1)
    console.print(f"baton up and its {len(family)} processes have ended", style="dim")


def _target(fleet: subprocess.Popen[str]) -> str:
    """The address in the ready line. If the fleet does not start, it has printed the reason, and this process ends
    too."""
    line = fleet.stdout.readline() if fleet.stdout else ""
    if not line.startswith("ready grpc="):
        sys.exit(fleet.wait() or 1)
    return line.split()[1].removeprefix("grpc=")


def _complete_twice(console: Console, target: str) -> None:
    """Complete the prompt twice; raises BatonError if the answers differ or nothing was cached."""
    with Client(target) as client:
        console.print(f"serving {client.get_model().name} on {target}\n", style="dim")
        console.print(_PROMPT, style="cyan", end="", markup=False)
        first = _complete(client, console)
        console.print("\nthe same prompt again:", style="dim")
        second = _complete(client, console)
    if first.token_ids != second.token_ids:
        raise BatonError(f"two runs with one seed differ: {first.token_ids} and {second.token_ids}")
    if second.usage is None or not second.usage.cached_tokens:
        raise BatonError("the second run found no cached tokens")


def _complete(client: Client, console: Console) -> Completion:
    completion = Completion()
    for delta in client.generate(_PROMPT, **_SAMPLING):
        completion.add(delta)
        console.file.write(delta.text)
        console.file.flush()
    console.print("\n")
    print_account(completion, console)
    return completion


def _stop(fleet: subprocess.Popen[str]) -> str:
    """End the fleet as Ctrl-C does; returns a description of the failure, or an empty text."""
    fleet.send_signal(signal.SIGINT)
    try:
        status = fleet.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        fleet.kill()
        fleet.wait()
        return f"the fleet did not stop within {_STOP_S:g} s"
    return f"the fleet ended with exit status {status}" if status else ""


def _descendants(pid: int) -> list[int]:
    """All processes that `pid` started, directly or not; empty where there is no /proc."""
    parents = {int(path.name): _stat(path)[1] for path in Path("/proc").glob("[0-9]*")}
    family = {pid}
    while found := {child for child, parent in parents.items() if parent in family} - family:
        family |= found
    return sorted(family - {pid})


def _alive(pid: int) -> bool:
    return _stat(Path("/proc", str(pid)))[0] not in ("", "Z")


def _stat(process: Path) -> tuple[str, int]:
    """State and parent of a process; ("", 0) if it is gone."""
    try:
        # The name, in parentheses, may contain any character.
        state, parent, *_ = process.joinpath("stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return state, int(parent)
