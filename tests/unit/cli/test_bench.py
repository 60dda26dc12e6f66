"""`baton bench` before it measures: what it could not write or load later is refused at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.cli.main import main

SERVE = ["serve", "grpc://127.0.0.1:1", "--concurrency=1", "--requests=1"]


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code != 0
    # A traceback would be an exception of another kind.
    assert isinstance(done.exception, SystemExit)
    return done.output


@pytest.mark.parametrize("command", [["engine", "MODEL"], ["router"], SERVE])
def test_a_report_that_can_not_be_written_is_refused(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "report.json"
    assert f"'--json': '{file}' can't be written" in refused(*command, f"--json={file}")
    assert f"'{tmp_path}' is a directory" in refused(*command, f"--json={tmp_path}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--plot=a.gif"], "'--plot': must end in .png or .svg, got 'a.gif'"),
        (["--plot=a.svg", "--prefill="], "--plot needs both prefill and decode"),
        (["--cpus=4-2"], "cpus: must be a list like 0-3,8, got '4-2'"),
    ],
)
def test_bad_flags_of_the_engine_bench_are_named(flags: list[str], words: str) -> None:
    said = refused("engine", "MODEL", *flags)
    assert words in said
    # As bad usage, not as a status of gRPC.
    assert "Usage: " in said


def test_a_folder_for_pictures_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "plots"
    assert f"'--plot': '{folder}' can't be made: Not a directory" in refused(*SERVE, f"--plot={folder}")


def test_what_is_no_report_is_named(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text('{"prefill": []}')
    assert f"'{file}' is no report of baton bench serve" in refused("plot", str(file), f"--to={tmp_path / 'a.png'}")


@pytest.mark.parametrize(
    ("command", "lacks", "extra"),
    [
        (["engine", "MODEL"], "torch", "worker"),
        (["engine", "MODEL", "--plot=a.svg"], "matplotlib", "bench"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    command: list[str], lacks: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, lacks, None)
    # Whoever was loaded before has it already.
    for name in [name for name in sys.modules if name.startswith("baton.bench")]:
        monkeypatch.delitem(sys.modules, name)
    assert f"{lacks} is missing: pip install 'baton[{extra}]'" in refused(*command)
