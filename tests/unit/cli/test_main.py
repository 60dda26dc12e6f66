"""The `baton` command as a whole."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.cli.main import main


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device of a full disk is Linux's")
def test_output_that_finds_a_full_disk_is_said_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "baton", "key", "new", "--file", str(tmp_path / "keys"), "--tenant", "a"]
    with open("/dev/full", "wb", 0) as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "Error: the output can't be written: No space left on device\n"


@pytest.mark.parametrize(
    ("command", "ours"), [("serve", "`baton up` serves"), ("chat", "`baton generate --chat FILE`")]
)
def test_commands_of_other_servers_lead_to_ours(command: str, ours: str) -> None:
    result = CliRunner().invoke(main, [command, "model"])
    assert result.exit_code == 2
    assert f"No such command {command!r}: {ours}" in " ".join(result.stderr.split())
