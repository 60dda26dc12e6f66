"""The `baton` command with the real services, the embedded Valkey and the bundled checkpoint."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton import Client
from baton.launcher import bound_to_me

BATON = [sys.executable, "-m", "baton"]
ADMIN = ("ca.crt", "admin.crt", "admin.key")
PROMPT = """def read(self, size=-1):
    if self.closed:
        raise ValueError("I/O operation on closed file")
    if size < 0:
"""


@contextmanager
def running(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """`baton up`: the process, the address, and the file with its standard error."""
    log = tmp_path / "up.log"
    command = bound_to_me([*BATON, "up", "--grpc=127.0.0.1:0", "--dtype=float32", *flags])
    with log.open("w") as stream, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True) as up:
        try:
            ready = up.stdout.readline()
            assert ready.startswith("ready grpc=127.0.0.1:"), log.read_text()
            yield up, ready.split()[1].removeprefix("grpc="), log
        finally:
            up.kill()


def generate(target: str, *arguments: str, api_key: str = "") -> subprocess.CompletedProcess[str]:
    command = [*BATON, "generate", f"--target={target}", *arguments]
    environ = os.environ | {"BATON_API_KEY": api_key}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)


def family(pid: int) -> dict[int, str]:
    """All descendants of a process with their command lines."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in found - {pid}}


def all_gone(pids: dict[int, str], within: float) -> bool:
    until = time.monotonic() + within
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
        finally:
            os.close(fd)
    return True


def test_up_generate_and_stop_while_streaming(tmp_path: Path) -> None:
    with running(tmp_path) as (up, target, log):
        greedy = ("--max-tokens=16", "--temperature=0")
        first = generate(target, PROMPT, *greedy)
        assert (first.returncode, first.stdout.strip() != "") == (0, True), first.stderr
        assert re.search(r"line +prefill +transfer +slot wait +decode +total", first.stderr)
        answer = json.loads(generate(target, PROMPT, *greedy, "--json", "--logprobs=2").stdout)
        assert answer["text"].rstrip("\n") == first.stdout.rstrip("\n")
        assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == len(answer["logprobs"])
        assert answer["usage"]["cached_tokens"] > 0
        account = answer["timings_ms"]
        parts = sum(account[name] for name in ("line", "prefill", "transfer", "slot_wait", "decode"))
        assert parts == pytest.approx(account["total"], abs=0.1)
        several = json.loads(generate(target, PROMPT, "--json", "-n", "4", "--seed=3", "--max-tokens=8").stdout)
        assert len({choice["text"] for choice in several["choices"]}) == 4

        chat = tmp_path / "chat.json"
        chat.write_text(json.dumps([{"role": "user", "content": "Write a function that adds two numbers."}]))
        assert generate(target, f"--chat={chat}", "--max-tokens=4", "--quiet").returncode == 0
        assert generate(target, "--token-ids=5,6,7", "--max-tokens=4", "--quiet").returncode == 0

        for arguments, status, part in (
            (("",), "INVALID_ARGUMENT", "text"),
            (("--token-ids=5,999999",), "INVALID_ARGUMENT", "999999"),
            (("x", "--max-tokens=1000000"), "INVALID_ARGUMENT", "1000000"),
            (("x", "--top-p=0"), "INVALID_ARGUMENT", "top_p"),
            (("x", "--model=other"), "NOT_FOUND", "other"),
        ):
            refused = generate(target, *arguments)
            assert refused.returncode == (1 if status == "NOT_FOUND" else 2), arguments
            assert refused.stderr.startswith(f"error: {status}: "), refused.stderr
            assert part in refused.stderr

        pids = family(up.pid)
        names = " ".join(pids.values())
        assert len(pids) == 4
        assert all(name in names for name in ("prefill_svc", "decode_svc", "-m router", "valkey"))
        command = [*BATON, "generate", f"--target={target}", "x = 1\n", "--ignore-eos", "--max-tokens=1500"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
            client.stdout.read(1)
            begin = time.monotonic()
            up.send_signal(signal.SIGTERM)
            assert up.wait(10) == 0
            assert time.monotonic() - begin < 5
            client.communicate(timeout=10)
        assert all_gone(pids, 0)
        assert up.stdout.read() == ""
        assert re.search(r"^decode-0 +\| ", log.read_text(), re.MULTILINE)


def test_a_secure_fleet_wants_its_key(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    with running(tmp_path, "--redis=none", f"--secure={secrets}") as (up, target, log):
        assert log.read_text().count("joined") == 2
        flags = ("x = 1\n", "--max-tokens=4", "--temperature=0", "--quiet", f"--ca={secrets / 'ca.crt'}")
        key = (secrets / "api.key").read_text().strip()
        answer = generate(target, *flags, api_key=key)
        assert (answer.returncode, answer.stdout != "") == (0, True), answer.stderr
        for environ, arguments, status, code in (
            ({}, flags, "UNAUTHENTICATED", 1),
            ({"api_key": key[:-1]}, flags, "UNAUTHENTICATED", 1),
            ({"api_key": key}, flags[:-1], "UNAVAILABLE", 75),
        ):
            refused = generate(target, *arguments, **environ)
            assert refused.returncode == code
            assert refused.stderr.startswith(f"error: {status}: "), refused.stderr
        assert key not in log.read_text()
        processes = family(up.pid).values()
        assert not any(key in command for command in processes)
        # One command asks the router by its key and the workers by the admin's certificate.
        router = next(command for command in processes if "-m router" in command)
        workers = re.findall(r"--(?:prefill|decode)=(\S+)", router)
        admin = [f"--{flag}={secrets / file}" for flag, file in zip(("ca", "cert", "key"), ADMIN, strict=True)]
        environ = os.environ | {"BATON_API_KEY": key}
        for command in (["ledger"], ["cache", "stats"]):
            asking = [*BATON, *command, f"--target={','.join([target, *workers])}", *admin, "--json"]
            done = subprocess.run(asking, capture_output=True, text=True, timeout=60, env=environ)
            assert (done.returncode, done.stderr) == (0, "")
            assert [each["role"] for each in json.loads(done.stdout)] == ["router", "prefill", "decode"]
        up.send_signal(signal.SIGTERM)
        assert up.wait(10) == 0


def test_a_killed_decode_worker_is_replaced_in_mid_stream_and_comes_back(tmp_path: Path) -> None:
    request = ("x = 1\n", "--max-tokens=200", "--ignore-eos", "--temperature=0", "--json")
    with running(tmp_path, "--redis=none", "--decode=2", "--log-level=info") as (up, target, log):
        alone = json.loads(generate(target, *request).stdout)
        with Client(target) as client:
            streams = [client.generate("x = 1\n", max_tokens=200, ignore_eos=True, temperature=0) for _ in range(2)]
            token_ids = [[token.token_id for token in next(stream).tokens] for stream in streams]
            victim = decode_workers(up.pid)["decode-0"]
            os.kill(victim, signal.SIGKILL)
            for ids, stream in zip(token_ids, streams, strict=True):
                ids += [token.token_id for delta in stream for token in delta.tokens]
        assert token_ids == [alone["token_ids"]] * 2
        ops = re.search(r"router +\|.* listening .*ops=(\S+)", log.read_text())[1]
        with urllib.request.urlopen(f"http://{ops}/metrics", timeout=10) as metrics:
            assert re.search(r"(?m)^baton_replays_total\{.*\} [1-9]", metrics.read().decode())
        wait_for(log, r"up +\| decode-0 was killed by SIGKILL; its last line: .*; it is started again at once\n")
        # The router has joined three workers, and the one that came back.
        wait_for(log, r"(?s)(router +\| [^\n]* joined.*){4}")
        workers = decode_workers(up.pid)
        assert workers.keys() == {"decode-0", "decode-1"}
        os.kill(workers["decode-1"], signal.SIGKILL)
        assert json.loads(generate(target, *request).stdout)["token_ids"] == alone["token_ids"]
        up.send_signal(signal.SIGTERM)
        assert up.wait(10) == 0


def test_a_killed_router_is_named_and_ends_all(tmp_path: Path) -> None:
    with running(tmp_path, "--redis=none") as (up, _, log):
        pids = family(up.pid)
        os.kill(next(pid for pid, command in pids.items() if "-m router" in command), signal.SIGKILL)
        assert up.wait(10) == 1
        assert "error: router was killed by SIGKILL" in log.read_text()
        assert all_gone(pids, 0)


def decode_workers(up: int) -> dict[str, int]:
    """Pids of the decode workers by name."""
    found = ((re.search(r"--worker-id=(decode-\d)", command), pid) for pid, command in family(up).items())
    return {match[1]: pid for match, pid in found if match}


def wait_for(log: Path, pattern: str) -> None:
    """Wait for a match in the log."""
    until = time.monotonic() + 30
    while not re.search(pattern, log.read_text()):
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def test_a_killed_supervisor_leaves_nothing_even_while_streaming(tmp_path: Path) -> None:
    with running(tmp_path, "--processes=2") as (up, target, _):
        assert sum("-m router.processes" in command for command in family(up.pid).values()) == 2
        command = [*BATON, "generate", f"--target={target}", "x = 1\n", "--ignore-eos", "--max-tokens=1500"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            client.stdout.read(1)
            pids = family(up.pid)
            up.kill()
            assert all_gone(pids, 5)
            _, said = client.communicate(timeout=10)
            assert client.returncode == 75
            assert "error: UNAVAILABLE" in said


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    from baton import bundled

    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in bundled.path().iterdir():
        if file.suffix in (".json", ".jinja"):
            (damaged / file.name).write_bytes(file.read_bytes())
    weights = (bundled.path() / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    done = subprocess.run(
        [*BATON, "up", f"--model={damaged}", "--grpc=127.0.0.1:0", "--redis=none"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.search(r"error: (prefill|decode)-0 ended with exit status \d", done.stderr)
    assert "model.safetensors" in done.stderr


def test_demo() -> None:
    done = subprocess.run([*BATON, "demo"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "the same prompt again" in done.stdout
    assert re.search(r"prompt \d+ tokens \([1-9]\d* cached: [1-9]\d* from pool", done.stdout)
    assert re.search(r"all 5 processes have ended", done.stdout)
