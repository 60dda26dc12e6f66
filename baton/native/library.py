"""The native library, or the reason why it can't be used.

The library is used only if it was compiled from the sources beside it, because an older one may compute other results
than these sources. It runs the kernels of the newest instruction set that the CPU has, but not those for AVX512-BF16 on
CPUs of Intel that have slow instructions for it. BATON_NATIVE_ISA chooses another one ("avx2"), for tests and if one
computes wrongly; BATON_NATIVE_LIBRARY names another file, such as one with a sanitizer.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from operator import mul
from pathlib import Path

from baton.errors import ConfigError
from baton.native import abi
from baton.native.build import LIBRARY, source_hash

_log = logging.getLogger(__name__)

ABI = 5
"""BATON_NATIVE_ABI in src/abi.h."""

REBUILD = "run `python -m baton.native.build`"

ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets in the order of `Isa` in src/cpu.h."""


class NativeUnavailable(Exception):
    """The library can't be used; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The choice of kernels: native ones if `library` is not None, else torch's operators; `reason` says why."""

    library: ctypes.CDLL | None
    reason: str = ""

    def unless(self, reason: str, wanted: str) -> Kernels:
        """This choice, or torch's operators for `reason`, if any; ConfigError if native kernels are `wanted`."""
        if not reason or self.library is None:
            return self
        if wanted == "native":
            raise ConfigError(f"kernels: native can't be used: {reason}")
        return Kernels(None, reason)

    def __str__(self) -> str:
        return f"native ({isa(self.library)})" if self.library else f"torch ({self.reason})"


def select_kernels(wanted: str) -> Kernels:
    """Choose kernels for a value of the setting `kernels`; raises ConfigError if native ones can't be used."""
    if wanted == "torch":
        return Kernels(None, "as configured")
    try:
        library = load()
    except NativeUnavailable as error:
        if wanted == "native":
            raise ConfigError(f"kernels: native can't be used: {error}") from None
        return Kernels(None, str(error))
    if wanted == "auto" and best_isa(library) == "scalar":
        # Without vector instructions, torch's operators are faster.
        return Kernels(None, "this CPU has no AVX2; --kernels native runs slow native ones")
    return Kernels(library)


@cache
def load() -> ctypes.CDLL:
    """Load the library, once in a process; raises NativeUnavailable, or ConfigError for BATON_NATIVE_ISA."""
    library = open_library(Path(os.environ.get("BATON_NATIVE_LIBRARY", LIBRARY)), source_hash())
    abi.declare(library)
    if chosen := os.environ.get("BATON_NATIVE_ISA"):
        select_isa(library, chosen)
    elif isa(library) not in ("scalar", "avx2") and not multiplies_exactly(library):
        _log.error("the native kernels for %s compute wrong products; the kernels for avx2 are used", isa(library))
        select_isa(library, "avx2")
    return library


def multiplies_exactly(library: ctypes.CDLL) -> bool:
    """Whether the selected kernels multiply small whole numbers right; compilers have erred in new instructions."""
    count, inputs, outputs = 18, 64, 40
    x = [(7 * i) % 11 - 5 for i in range(count * inputs)]
    weight = [(5 * i) % 13 - 6 for i in range(outputs * inputs)]
    rows, columns = ([each[i : i + inputs] for i in range(0, len(each), inputs)] for each in (x, weight))
    wanted = [float(sum(map(mul, row, column))) for row in rows for column in columns]
    given, loaded = (ctypes.c_float * len(x))(*x), (ctypes.c_float * len(weight))(*weight)
    for kind in (abi.FLOAT32, abi.BFLOAT16):
        packed = (ctypes.c_float * library.baton_native_packed_size(outputs, inputs))()
        found = (ctypes.c_float * len(wanted))()
        library.baton_native_pack(loaded, abi.FLOAT32, outputs, inputs, 0, packed, kind)
        library.baton_native_linear(given, count, inputs, packed, kind, outputs, None, found, 1)
        if list(found) != wanted:
            return False
    return True


def open_library(path: Path, expected_hash: str) -> ctypes.CDLL:
    """Load the library at `path`; raises NativeUnavailable if it is not built from sources with this hash."""
    if not path.exists():
        raise NativeUnavailable(f"{path} does not exist; with a C++17 compiler, {REBUILD}")
    try:
        library = ctypes.CDLL(str(path))
        library.baton_native_source_hash.restype = ctypes.c_char_p
        library.baton_native_isa.restype = library.baton_native_best_isa.restype = ctypes.c_char_p
        library.baton_native_select_isa.argtypes = (ctypes.c_char_p,)
        abi, built_from = library.baton_native_abi(), library.baton_native_source_hash().decode()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} can't be loaded: {error}; {REBUILD}") from None
    if abi != ABI:
        raise NativeUnavailable(f"{path} has ABI {abi}, not {ABI}; {REBUILD}")
    if expected_hash and built_from != expected_hash:
        raise NativeUnavailable(f"{path} is stale: it was built from other sources; {REBUILD}")
    return library


def isa(library: ctypes.CDLL) -> str:
    """Name of the instruction set whose kernels run: scalar, avx2, avx512, avx512_bf16 or amx."""
    return str(library.baton_native_isa().decode())


def best_isa(library: ctypes.CDLL) -> str:
    """Name of the best instruction set of this machine."""
    return str(library.baton_native_best_isa().decode())


def select_isa(library: ctypes.CDLL, name: str) -> None:
    """Select the instruction set of the kernels; raises ConfigError if it is unknown or the CPU lacks it."""
    if status := library.baton_native_select_isa(name.encode()):
        problem = "an unknown instruction set" if status == 1 else f"beyond the best one here, {best_isa(library)}"
        raise ConfigError(f"BATON_NATIVE_ISA: {name!r} is {problem}")
