"""The native library: how it is compiled, which instruction set it chooses, and when it is refused."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.native import library as native
from baton.native.build import LIBRARY as LIBRARY_FILE
from baton.native.build import SOURCES, BuildError, NoCompiler, build, find_compiler, source_hash
from baton.native.library import NativeUnavailable, best_isa, isa, open_library, select_isa, select_kernels
from tests.kernels import LIBRARY, needs_native

ROOT = Path(__file__).resolve().parents[3]
ISA_SOURCES = {
    "isa_avx2.cpp": ("avx2", {"avx2", "fma", "f16c"}),
    "isa_avx512.cpp": ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    "isa_avx512_bf16.cpp": ("avx512_bf16", {"avx512_bf16"}),
    "isa_amx.cpp": ("amx", {"amx_tile", "amx_bf16"}),
}
"""Units of instruction sets, their names, and the flags in /proc/cpuinfo that they need beside those before."""


def has_compiler() -> bool:
    try:
        find_compiler()
    except NoCompiler:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++17 compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The sources without kernels, which compile within a second."""
    folder = tmp_path / "src"
    copy_sources(folder, 0)
    return folder


def copy_sources(folder: Path, units: int) -> None:
    """Those without kernels, and so many empty units of instruction sets."""
    folder.mkdir(exist_ok=True)
    for name in ("abi.cpp", "abi.h", "cpu.cpp", "cpu.h"):
        shutil.copy(SOURCES / name, folder)
    for name in list(ISA_SOURCES)[:units]:
        (folder / name).write_text("")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for this CPU's best instruction set, without kernels."""
    sources = tmp_path_factory.mktemp("built") / "src"
    copy_sources(sources, len(ISA_SOURCES))
    output = sources.parent / "compiled.so"
    build(output, sources=sources)
    return output


@pytest.fixture
def compiled(built: Path, sources: Path, tmp_path: Path) -> Path:
    """A copy of that library, beside its sources."""
    copy_sources(sources, len(ISA_SOURCES))
    return Path(shutil.copy(built, tmp_path))


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not loaded the library; what is chosen in it is undone."""
    native.load.cache_clear()
    monkeypatch.delenv("BATON_NATIVE_ISA", raising=False)
    before = isa(LIBRARY) if LIBRARY else ""
    yield
    native.load.cache_clear()
    if LIBRARY:
        select_isa(LIBRARY, before)


def fastest_isa(library: ctypes.CDLL) -> str:
    """The best one, unless this is a CPU of Intel whose AMX is hidden."""
    words = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    best = best_isa(library)
    return "avx512" if best == "avx512_bf16" and {"GenuineIntel", "avx512_fp16"} <= set(words) else best


def run_without_compiler(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True)


@needs_compiler
def test_a_library_of_the_same_sources_is_loaded(built: Path) -> None:
    library = open_library(built, source_hash(built.parent / "src"))
    assert isa(library) == fastest_isa(library)
    assert [each.name for each in built.parent.iterdir() if each.name.startswith(".")] == []


@needs_compiler
@pytest.mark.parametrize("change", ["content", "name", "removed"])
def test_a_library_of_other_sources_is_refused(compiled: Path, sources: Path, change: str) -> None:
    header = sources / "cpu.h"
    if change == "content":
        header.write_text(header.read_text() + "\n")
    elif change == "name":
        header.rename(sources / "cpus.h")
    else:
        header.unlink()
    with pytest.raises(NativeUnavailable, match=r"compiled\.so is stale.*python -m baton\.native\.build"):
        open_library(compiled, source_hash(sources))
    # As in an installation that has no sources.
    open_library(compiled, source_hash(sources.parent))


@needs_compiler
def test_a_library_of_another_abi_is_refused(sources: Path, tmp_path: Path) -> None:
    header = sources / "abi.h"
    header.write_text(header.read_text().replace(f"BATON_NATIVE_ABI {native.ABI}", "BATON_NATIVE_ABI 999"))
    build(tmp_path / "other.so", sources=sources)
    with pytest.raises(NativeUnavailable, match=f"has ABI 999, not {native.ABI}"):
        open_library(tmp_path / "other.so", source_hash(sources))


def test_invalid_libraries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match=r"none\.so does not exist"):
        open_library(tmp_path / "none.so", "")
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(NativeUnavailable, match=r"text\.so can't be loaded"):
        open_library(tmp_path / "text.so", "")


@pytest.mark.usefixtures("not_loaded")
def test_without_a_library_torch_runs_unless_native_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    chosen = select_kernels("auto")
    assert chosen.library is None
    assert "none.so does not exist" in str(chosen)
    assert str(select_kernels("torch")) == "torch (as configured)"
    with pytest.raises(ConfigError, match=r"^kernels: native can't be used: .*none\.so does not exist"):
        select_kernels("native")


@needs_native
@pytest.mark.usefixtures("not_loaded")
def test_with_a_library_native_kernels_run_unless_torch_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = select_kernels("native")
    assert isinstance(chosen.library, ctypes.CDLL)
    assert str(chosen) == f"native ({fastest_isa(chosen.library)})"
    for best in native.ISAS:
        monkeypatch.setattr(native, "best_isa", lambda _, best=best: best)
        assert str(select_kernels("auto")) == (
            "torch (this CPU has no AVX2; --kernels native runs slow native ones)" if best == "scalar" else str(chosen)
        )
    assert select_kernels("torch").library is None


@needs_native
@pytest.mark.usefixtures("not_loaded")
def test_a_variable_chooses_an_older_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_NATIVE_ISA", "scalar")
    assert str(select_kernels("native")) == "native (scalar)"
    native.load.cache_clear()
    monkeypatch.setenv("BATON_NATIVE_ISA", "sse9")
    with pytest.raises(ConfigError, match="BATON_NATIVE_ISA: 'sse9' is an unknown instruction set"):
        select_kernels("native")


@needs_compiler
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs the flags that Linux shows")
@pytest.mark.parametrize("count", range(len(ISA_SOURCES) + 1))
def test_the_best_instruction_set_is_that_of_cpu_and_library(
    built: Path, sources: Path, tmp_path: Path, count: int
) -> None:
    copy_sources(sources, count)
    output = tmp_path / "library.so"
    if count == len(ISA_SOURCES):
        shutil.copy(built, output)
    else:
        build(output, sources=sources)
    library = open_library(output, source_hash(sources))
    cpu = next((line.split() for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:5] == "flags"), [])
    there = ["scalar"]
    for name, needed in list(ISA_SOURCES.values())[:count]:
        if not needed <= set(cpu):
            break
        there.append(name)
    assert fastest_isa(library) == there[-1]
    for name in ("scalar", *(name for name, _ in ISA_SOURCES.values())):
        if name in there:
            select_isa(library, name)
            assert isa(library) == name
        else:
            with pytest.raises(ConfigError, match=f"BATON_NATIVE_ISA: '{name}' is beyond the best one here"):
                select_isa(library, name)


@needs_compiler
def test_only_functions_of_the_interface_are_visible(compiled: Path) -> None:
    shown = subprocess.run(["nm", "-D", "--defined-only", compiled], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in shown.splitlines()}
    assert "baton_native_abi" in names
    assert {name for name in names if not name.startswith("baton_")} == set()


@needs_native
def test_the_configuration_of_tiles_is_in_the_library_whole() -> None:
    """Not written by code: compilers that believe that 8 of its 64 bytes are read leave the others out."""
    library = LIBRARY_FILE.read_bytes()
    palette, row_bytes, rows = b"\1".ljust(16, b"\0"), (b"\x40\0" * 8).ljust(32, b"\0"), (b"\x10" * 8).ljust(16, b"\0")
    # An old compiler leaves out the file.
    assert palette + row_bytes + rows in library or b"amx_bfloat16" not in library


@needs_compiler
def test_a_failed_build_says_why_and_leaves_the_library_alone(compiled: Path, sources: Path) -> None:
    before = compiled.read_bytes()
    (sources / "broken.cpp").write_text("int broken() { return nothing; }\n")
    with pytest.raises(BuildError, match=r"broken\.cpp.*\n.*nothing"):
        build(compiled, sources=sources)
    assert compiled.read_bytes() == before


def test_the_command_needs_a_compiler_unless_told_otherwise(tmp_path: Path) -> None:
    command = ["-m", "baton.native.build", "--output", str(tmp_path / "library.so")]
    failed = run_without_compiler(tmp_path, *command)
    assert (failed.returncode, failed.stderr) == (1, "error: no C++17 compiler found (tried c++, g++, clang++)\n")
    skipped = run_without_compiler(tmp_path, *command, "--if-compiler")
    assert skipped.returncode == 0
    assert skipped.stdout.startswith("native kernels are not built: no C++17 compiler found")
    assert not (tmp_path / "library.so").exists()


def test_installation_goes_on_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    folders = [f"--build-lib={tmp_path}/lib", f"--build-temp={tmp_path}/temp"]
    done = run_without_compiler(tmp_path, "setup.py", "build_ext", *folders)
    assert done.returncode == 0, done.stderr
    assert "no C++17 compiler found" in done.stdout + done.stderr
    assert list(tmp_path.rglob("*.so")) == []
