"""`python -m router` as a process: quick to start, told by signals, exact about bad settings."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.config.router import RouterConfig
from baton.errors import BatonError
from router.app import run
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


def test_starts_and_stops(tmp_path: Path) -> None:
    with start(f"--model={checkpoint(tmp_path)}", *WORKERS) as router:
        line = router.stdout.readline()
        assert re.fullmatch(r"listening grpc=127\.0\.0\.1:\d+ ops=127\.0\.0\.1:\d+\n", line)
        router.send_signal(signal.SIGINT)
        _, log = router.communicate(timeout=60)
    assert router.returncode == 0, log


def test_a_full_disk_under_its_output_does_not_end_a_service(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "router", f"--model={checkpoint(tmp_path)}", *WORKERS, "--log-level=info"]
    with Path("/dev/full").open("w") as full, subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE) as router:
        assert router.stderr is not None
        assert any(b"listening grpc=" in line for line in router.stderr)
        router.send_signal(signal.SIGTERM)
        _, log = router.communicate(timeout=60)
    assert router.returncode == 0, log
    assert b"draining after SIGTERM" in log


@pytest.mark.parametrize(("setting", "value"), [("grpc", "0.0.0.0:0"), ("model", "/no/such/place")])
async def test_bad_settings_are_named(tmp_path: Path, setting: str, value: str) -> None:
    """Settings that flags alone do not show to be bad; for the others see the unit tests of the settings."""
    workers: dict[str, Any] = {"prefill": ("127.0.0.1:1",), "decode": ("127.0.0.1:1",)}
    config = RouterConfig(**{"model": str(checkpoint(tmp_path)), **workers, setting: value})
    with pytest.raises(BatonError, match=value):
        async with run(config):
            pytest.fail("it has started")
