"""Compile the C++ sources into one shared library; standard library only, because installation runs it too (setup.py).

    python -m baton.native.build                                compile the library in place
    python -m baton.native.build --if-compiler                  the same, but nothing without a compiler
    python -m baton.native.build --sanitize address,undefined --output build/asan/_baton_native.so
    python -m baton.native.build --emulate tests/emulation --output build/emulate/_baton_native.so

The library runs on every CPU of its architecture: the source file of each instruction set has flags of its own, and the
library chooses at run time (src/cpu.h). The compiler is that of $CXX, else c++, g++ or clang++.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARY = HERE / "_baton_native.so"

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-pthread", "-Wall")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
_AMX = (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16")
_ISA_SOURCES = {
    "isa_avx2.cpp": _AVX2,
    "isa_avx512.cpp": _AVX512,
    "isa_avx512_bf16.cpp": _AVX512_BF16,
    "isa_amx.cpp": _AMX,
}
"""Source files of the instruction sets of x86 and their flags, in the order of `Isa` in cpu.h after kScalar."""


class BuildError(Exception):
    """The library can't be compiled; the message has the output of the compiler."""


class NoCompiler(BuildError):
    """There is no C++17 compiler."""


def source_hash(sources: Path = SOURCES) -> str:
    """SHA-256 over names and contents of the sources, and over the flags, in hexadecimal; "" if there are none."""
    files = sorted((*sources.glob("*.cpp"), *sources.glob("*.h")))
    if not files:
        return ""
    return hash_of(files, repr((_FLAGS, _ISA_SOURCES)))


def hash_of(files: Iterable[Path], start: str = "") -> str:
    """SHA-256 over `start`, and over names and contents of files in their order, in hexadecimal."""
    digest = hashlib.sha256(start.encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"\n{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def find_compiler() -> list[str]:
    """The command of a C++17 compiler; raises NoCompiler, with the commands that were tried."""
    wanted = os.environ.get("CXX")
    tried = [shlex.split(wanted)] if wanted else [["c++"], ["g++"], ["clang++"]]
    for command in tried:
        if shutil.which(command[0]) and _accepts([*command, "-std=c++17"], "#include <thread>\n"):
            return command
    names = ", ".join(shlex.join(each) for each in tried)
    raise NoCompiler(f"no C++17 compiler found (tried {names})")


def build(output: Path = LIBRARY, *, sources: Path = SOURCES, sanitize: str = "", emulate: Path | None = None) -> None:
    """Compile the source files, in parallel, and replace `output` with the library.

    `sanitize` is a value of the compiler's -fsanitize=. `emulate` is a folder of headers that emulate AVX-512 and AMX:
    the library then runs all kernels on a CPU with AVX2, slowly, for tests. Raises BuildError.
    """
    compiler = find_compiler()
    flags = [*_FLAGS, *_sanitizer_flags(sanitize)]
    isas = _usable_isas(compiler, sources)
    if emulate is not None:
        flags.append("-DBATON_EMULATE")
        isas = {
            name: _AVX2 if own == _AVX2 else (*_AVX2, "-Wno-psabi", f"-I{emulate}")
            for name, own in _ISA_SOURCES.items()
        }
    defines = [f'-DBATON_NATIVE_SOURCE_HASH="{source_hash(sources)}"', f"-DBATON_NEWEST_ISA={len(isas)}"]
    compiled = [path for path in sorted(sources.glob("*.cpp")) if path.name not in _ISA_SOURCES or path.name in isas]
    output.parent.mkdir(parents=True, exist_ok=True)
    # In the folder of the output, so that a rename replaces the library, and processes keep the old one if loaded.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".native-") as folder:
        objects = [Path(folder, f"{file.stem}.o") for file in compiled]
        commands = [
            [*compiler, *flags, *isas.get(file.name, ()), *defines, "-c", str(file), "-o", str(made)]
            for file, made in zip(compiled, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as beside:
            list(beside.map(_run, commands))
        linked = Path(folder, output.name)
        _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(linked)])
        linked.replace(output)


def _usable_isas(compiler: list[str], sources: Path) -> dict[str, tuple[str, ...]]:
    """Source files of the instruction sets that this compiler supports, in order, with their flags."""
    usable: dict[str, tuple[str, ...]] = {}
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return usable
    for name, flags in _ISA_SOURCES.items():
        if not (sources / name).exists() or not _accepts([*compiler, *flags], "#include <immintrin.h>\n"):
            break
        usable[name] = flags
    return usable


def _sanitizer_flags(sanitize: str) -> list[str]:
    # An error that UBSan finds ends the process too, so that a test fails.
    return [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"] if sanitize else []


def _accepts(command: list[str], code: str) -> bool:
    done = subprocess.run([*command, "-fsyntax-only", "-x", "c++", "-"], input=code, text=True, capture_output=True)
    return done.returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}")
    sys.stderr.write(done.stdout)


def main() -> None:
    """Compile the native kernels, as `--help` says.

    Exits with status 1 on failure, but with 0 without a compiler under `--if-compiler`.
    """
    parser = argparse.ArgumentParser(prog="python -m baton.native.build", description="Compile the native kernels.")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="The library (default: %(default)s).")
    parser.add_argument("--sanitize", default="", help="Sanitizers, such as address,undefined or thread.")
    parser.add_argument("--emulate", type=Path, help="Headers that emulate newer instruction sets, for tests.")
    parser.add_argument("--if-compiler", action="store_true", help="Do nothing if there is no C++17 compiler.")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        build(options.output.resolve(), sanitize=options.sanitize, emulate=options.emulate)
    except NoCompiler as error:
        if not options.if_compiler:
            sys.exit(f"error: {error}")
        print(f"native kernels are not built: {error}")
    except (BuildError, OSError) as error:
        sys.exit(f"error: {error}")
    else:
        print(f"built {options.output} in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
