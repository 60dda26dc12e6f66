"""The `baton` command as a whole."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device of a full disk is Linux's")
def test_output_that_finds_a_full_disk_is_said_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "baton", "key", "new", "--file", str(tmp_path / "keys"), "--tenant", "a"]
    with open("/dev/full", "wb", 0) as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "Error: the output can't be written: No space left on device\n"
