"""The instruction sets of this machine in turn."""

from collections.abc import Iterator
from ctypes import CDLL

import pytest

from baton.native import abi
from baton.native.library import ISAS, best_isa, isa, select_isa
from tests.kernels import LIBRARY


@pytest.fixture(params=ISAS[: ISAS.index(best_isa(LIBRARY)) + 1] if LIBRARY else ())
def library(request: pytest.FixtureRequest) -> Iterator[CDLL]:
    """The native library, running the kernels of one instruction set."""
    assert LIBRARY is not None
    abi.declare(LIBRARY)
    before = isa(LIBRARY)
    select_isa(LIBRARY, request.param)
    yield LIBRARY
    select_isa(LIBRARY, before)
