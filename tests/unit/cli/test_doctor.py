"""`baton doctor` says which kernels run on this machine, and why not the native ones."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.cli.doctor import doctor
from baton.native import library


def test_a_missing_library_is_reported_with_the_remedy_and_fails_if_native_kernels_are_demanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    library.load.cache_clear()
    try:
        found = CliRunner().invoke(doctor, [], env={"CXX": "no-such-compiler"})
        failed = CliRunner().invoke(doctor, [], env={"BATON_KERNELS": "native"})
    finally:
        library.load.cache_clear()
    rows = dict(line.split(maxsplit=1) for line in found.stdout.splitlines())
    assert "none.so does not exist" in rows["kernels"]
    assert "(tried no-such-compiler)" in rows["compiler"]
    assert (found.exit_code, failed.exit_code) == (0, 2)
    assert "none.so does not exist" in failed.stderr
