"""The instruction sets of this machine in turn."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL

import pytest

from baton.native import abi
from baton.native.library import best_isa, select_isa
from tests.kernels import LIBRARY

ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")


def _here() -> tuple[str, ...]:
    return ISAS[: ISAS.index(best_isa(LIBRARY)) + 1] if LIBRARY else ()


@pytest.fixture(params=_here())
def library(request: pytest.FixtureRequest) -> Iterator[CDLL]:
    """The native library, running the kernels of one instruction set."""
    assert LIBRARY is not None
    abi.declare(LIBRARY)
    select_isa(LIBRARY, request.param)
    yield LIBRARY
    select_isa(LIBRARY, best_isa(LIBRARY))
