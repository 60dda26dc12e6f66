"""`python -m router` as a process: quick to start, told by signals, exact about bad settings."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.router_stubs import checkpoint

WORKERS = ["--prefill=127.0.0.1:1", "--decode=127.0.0.1:1"]


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "router", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_starts_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    begin = time.monotonic()
    with start(f"--model={checkpoint(tmp_path)}", *WORKERS) as router:
        assert router.stdout is not None
        line = router.stdout.readline()
        took = time.monotonic() - begin
        assert re.fullmatch(r"listening grpc=127\.0\.0\.1:\d+ ops=127\.0\.0\.1:\d+\n", line)
        router.send_signal(number)
        _, log = router.communicate(timeout=10)
    assert router.returncode == 0, log
    # It takes well under a second; the rest is for a machine that has other things to do.
    assert took < 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--decode=127.0.0.1:1"], "--prefill: names no worker"),
        ([*WORKERS, "--line-capacity=0"], "--line-capacity: must be at least 1, got '0'"),
        ([*WORKERS, "--colour=red"], "--colour: unknown flag"),
        (["--prefill=nowhere", "--decode=127.0.0.1:1"], "--prefill: must be HOST:PORT"),
        ([*WORKERS, "--grpc=0.0.0.0:0"], "0.0.0.0:0"),
        ([*WORKERS, "--model=/no/such/place"], "/no/such/place"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, arguments: list[str], words: str) -> None:
    model = [] if any(argument.startswith("--model") for argument in arguments) else [f"--model={checkpoint(tmp_path)}"]
    with start(*arguments, *model) as router:
        _, log = router.communicate(timeout=20)
    assert router.returncode == 2
    assert words in log


def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = "import router.__main__, sys; print(sorted({'torch', 'transformers', 'numpy', 'redis'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
