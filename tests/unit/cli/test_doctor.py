"""`baton doctor` says which kernels run on this machine, and why not the native ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.cli.doctor import doctor
from baton.native import library


@pytest.fixture(autouse=True)
def without_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stands for an installation where nothing was compiled."""
    monkeypatch.setenv("BATON_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def test_a_missing_library_is_told_with_the_remedy() -> None:
    found = CliRunner().invoke(doctor, [], env={"CXX": "no-such-compiler"})
    assert found.exit_code == 0
    rows = dict(line.split(maxsplit=1) for line in found.stdout.splitlines())
    assert rows["kernels"].startswith("torch (")
    assert "none.so does not exist" in rows["kernels"]
    assert "python -m baton.native.build" in rows["kernels"]
    assert "(tried no-such-compiler)" in rows["compiler"]


def test_it_fails_if_native_kernels_are_demanded_and_missing() -> None:
    found = CliRunner().invoke(doctor, [], env={"BATON_KERNELS": "native"})
    assert found.exit_code == 2
    assert "BATON_KERNELS" in found.stderr
    assert "none.so does not exist" in found.stderr
