"""The `baton` command with the real services, the embedded Valkey and the bundled checkpoint.

A fleet takes many seconds to start, so that one serves for all that can be asked of it, and ends by what ends it.
"""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton import Client
from baton.process.supervisor import bind_to_parent
from tests.processes import gone

BATON = [sys.executable, "-m", "baton"]
ADMIN = ("ca.crt", "admin.crt", "admin.key")
PROMPT = """def read(self, size=-1):
    if self.closed:
        raise ValueError("I/O operation on closed file")
    if size < 0:
"""
HANG_S = 120.0


@contextmanager
def running(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """`baton up`: the process, the address, and the file with its standard error."""
    log = tmp_path / "up.log"
    command = bind_to_parent([*BATON, "up", "--grpc=127.0.0.1:0", "--dtype=float32", *flags])
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
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environ)


@contextmanager
def streaming(target: str, *arguments: str, api_key: str = "") -> Iterator[subprocess.Popen[str]]:
    """`baton generate` with much to say, once it has begun."""
    command = [*BATON, "generate", f"--target={target}", "x = 1\n", "--ignore-eos", "--max-tokens=1500", *arguments]
    environ = os.environ | {"BATON_API_KEY": api_key}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ) as client:
        assert client.stdout.read(1)
        yield client


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


def decode_workers(up: int) -> dict[str, int]:
    """Pids of the decode workers by name."""
    found = ((re.search(r"--worker-id=(decode-\d)", command), pid) for pid, command in family(up).items())
    return {match[1]: pid for match, pid in found if match}


def wait_for(log: Path, pattern: str) -> None:
    until = time.monotonic() + HANG_S
    while not re.search(pattern, log.read_text()):
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def test_up_generate_kill_and_stop_while_streaming(tmp_path: Path) -> None:
    with running(tmp_path, "--decode=2", "--log-level=info", "--drain-s=3600") as (up, target, log):
        answers(target, tmp_path)
        refuses(target)
        a_killed_decode_worker_is_replaced_in_mid_stream_and_comes_back(up, target, log)
        pids = family(up.pid)
        names = " ".join(pids.values())
        assert len(pids) == 5
        assert all(name in names for name in ("prefill_svc", "decode_svc", "-m router", "valkey"))
        with streaming(target, "--max-tokens=300") as client:
            up.send_signal(signal.SIGTERM)
            _, said = client.communicate(timeout=HANG_S)
            assert client.returncode == 0, said
            assert "300" in said, "the stream has come to its end"
        assert up.wait(HANG_S) == 0
        assert gone(pids, 0)
        assert "draining 1 request, up to 3600 s; press Ctrl-C again to stop now\n" in log.read_text()
        assert up.stdout.read() == ""
        assert re.search(r"^decode-0 +\| ", log.read_text(), re.MULTILINE)


def answers(target: str, tmp_path: Path) -> None:
    greedy = ("--max-tokens=16", "--temperature=0")
    first = generate(target, PROMPT, *greedy)
    assert (first.returncode, first.stdout.strip() != "") == (0, True), first.stderr
    assert re.search(r"queue +prefill +transfer +slot wait +decode +total", first.stderr)
    answer = json.loads(generate(target, PROMPT, *greedy, "--json", "--logprobs=2").stdout)
    assert answer["text"].rstrip("\n") == first.stdout.rstrip("\n")
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == len(answer["logprobs"])
    assert answer["usage"]["cached_tokens"] > 0
    account = answer["timings_ms"]
    parts = sum(account[name] for name in ("queue", "prefill", "transfer", "slot_wait", "decode"))
    assert parts == pytest.approx(account["total"], abs=0.1)
    several = json.loads(generate(target, PROMPT, "--json", "-n", "4", "--seed=3", "--max-tokens=8").stdout)
    assert len({choice["text"] for choice in several["choices"]}) == 4
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([{"role": "user", "content": "Write a function that adds two numbers."}]))
    assert generate(target, f"--chat={chat}", "--max-tokens=4", "--quiet").returncode == 0
    assert generate(target, "--token-ids=5,6,7", "--max-tokens=4", "--quiet").returncode == 0


def refuses(target: str) -> None:
    for arguments, status, part in (
        (("--token-ids=5,999999",), "INVALID_ARGUMENT", "999999"),
        (("x", "--model=other"), "NOT_FOUND", "other"),
    ):
        refused = generate(target, *arguments)
        assert refused.returncode == (1 if status == "NOT_FOUND" else 2), arguments
        assert refused.stderr.startswith(f"error: {status}: "), refused.stderr
        assert part in refused.stderr


def a_killed_decode_worker_is_replaced_in_mid_stream_and_comes_back(
    up: subprocess.Popen[str], target: str, log: Path
) -> None:
    # So long that no stream ends before the kill, however long this process waits for a core.
    tokens = 1500
    request = ("x = 1\n", f"--max-tokens={tokens}", "--ignore-eos", "--temperature=0", "--json")
    alone = json.loads(generate(target, *request).stdout)
    with Client(target) as client:
        streams = [client.generate("x = 1\n", max_tokens=tokens, ignore_eos=True, temperature=0) for _ in range(2)]
        token_ids = [[token.token_id for token in next(stream).tokens] for stream in streams]
        os.kill(decode_workers(up.pid)["decode-0"], signal.SIGKILL)
        for ids, stream in zip(token_ids, streams, strict=True):
            ids += [token.token_id for delta in stream for token in delta.tokens]
    assert token_ids == [alone["token_ids"]] * 2
    ops = re.search(r"router +\|.* listening .*ops=(\S+)", log.read_text())[1]  # type: ignore[index]
    with urllib.request.urlopen(f"http://{ops}/metrics", timeout=HANG_S) as metrics:
        assert re.search(r"(?m)^baton_replays_total\{.*\} [1-9]", metrics.read().decode())
    wait_for(log, r"up +\| decode-0 was killed by SIGKILL; its last line: .*; it is started again at once\n")
    # The router has joined three workers, and the one that came back.
    wait_for(log, r"(?s)(router +\| [^\n]* joined.*){4}")
    assert decode_workers(up.pid).keys() == {"decode-0", "decode-1"}


def models_over_https(address: str, ca: Path, key: str) -> None:
    """The HTTP API of a secure fleet wants its key too."""
    url, context = f"https://{address}/v1/models", ssl.create_default_context(cafile=str(ca))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, context=context, timeout=HANG_S)
    asked = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, context=context, timeout=HANG_S) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["bundled"]


def test_a_secure_fleet_wants_its_key_and_a_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    with running(tmp_path, "--processes=2", f"--secure={secrets}", "--http=127.0.0.1:0") as (up, target, log):
        key = (secrets / "api.key").read_text().strip()
        wants_its_key(target, secrets, key)
        assert key not in log.read_text()
        pids = family(up.pid)
        assert not any(key in command for command in pids.values())
        assert sum("-m router.processes" in command for command in pids.values()) == 2
        # One command asks the routers by the key and the workers by the admin's certificate.
        router = next(command for command in pids.values() if "-m router" in command)
        workers = re.findall(r"--(?:prefill|decode)=(\S+)", router)
        served = next(command for command in pids.values() if "-m router.processes" in command)
        models_over_https(re.findall(r"--http=(\S+)", served)[0], secrets / "ca.crt", key)
        admin = [f"--{flag}={secrets / file}" for flag, file in zip(("ca", "cert", "key"), ADMIN, strict=True)]
        environ = os.environ | {"BATON_API_KEY": key}
        for command in (["ledger"], ["cache", "stats"]):
            asking = [*BATON, *command, f"--target={','.join([target, *workers])}", *admin, "--json"]
            done = subprocess.run(asking, capture_output=True, text=True, timeout=HANG_S, env=environ)
            assert (done.returncode, done.stderr) == (0, "")
            assert [each["role"] for each in json.loads(done.stdout)] == ["router", "prefill", "decode"]
        with streaming(target, f"--ca={secrets / 'ca.crt'}", api_key=key) as client:
            pids = family(up.pid)
            up.kill()
            assert gone(pids)
            _, said = client.communicate(timeout=HANG_S)
            assert client.returncode == 75
            assert "error: UNAVAILABLE" in said


def wants_its_key(target: str, secrets: Path, key: str) -> None:
    flags = ("x = 1\n", "--max-tokens=4", "--temperature=0", "--quiet", f"--ca={secrets / 'ca.crt'}")
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


def test_the_demo_command_serves_from_cache_and_ends_all_processes() -> None:
    done = subprocess.run([*BATON, "demo"], capture_output=True, text=True, timeout=2 * HANG_S)
    assert done.returncode == 0, done.stderr
    assert "the same prompt again" in done.stdout
    assert re.search(r"prompt \d+ tokens \([1-9]\d* cached: [1-9]\d* from pool", done.stdout)
    assert "baton up and its 4 processes have ended" in done.stdout
