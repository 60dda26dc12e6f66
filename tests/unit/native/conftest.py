"""The instruction sets of this machine in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from ctypes import CDLL

import pytest

from baton.native import abi
from baton.native.library import ISAS, PROVEN, best_isa, isa, select_isa
from tests.kernels import LIBRARY


def _here() -> tuple[str, ...]:
    """Those up to the newest one that has run, or that BATON_NATIVE_ISA names."""
    if not LIBRARY:
        return ()
    newest = min(best_isa(LIBRARY), os.environ.get("BATON_NATIVE_ISA", PROVEN), key=ISAS.index)
    return ISAS[: ISAS.index(newest) + 1]


@pytest.fixture(params=_here())
def library(request: pytest.FixtureRequest) -> Iterator[CDLL]:
    """The native library, running the kernels of one instruction set."""
    assert LIBRARY is not None
    abi.declare(LIBRARY)
    before = isa(LIBRARY)
    select_isa(LIBRARY, request.param)
    yield LIBRARY
    select_isa(LIBRARY, before)
