"""`baton bench` before it measures: what it could not write or load later is refused at once."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.cli.main import main


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code != 0
    # A traceback would be an exception of another kind.
    assert isinstance(done.exception, SystemExit)
    return done.output


def test_a_report_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "report.json"
    assert f"'--json': '{file}' can't be written" in refused("engine", "MODEL", f"--json={file}")
    assert f"'{tmp_path}' is a directory" in refused("engine", "MODEL", f"--json={tmp_path}")


def test_bad_flags_of_the_engine_bench_are_named() -> None:
    said = refused("engine", "MODEL", "--cpus=4-2")
    assert "cpus: must be a list like 0-3,8, got '4-2'" in said
    # As bad usage, not as a status of gRPC.
    assert "Usage: " in said


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    # Whoever was loaded before has it already.
    for name in [name for name in sys.modules if name.startswith("baton.bench")]:
        monkeypatch.delitem(sys.modules, name)
    assert "torch is missing; in the checkout: pip install '.[worker]'" in refused("engine", "MODEL")
