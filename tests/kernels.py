"""The kernels that CPU tests run over: torch's operators, and the native ones where they are built."""

from ctypes import CDLL

import pytest

from baton.native.library import NativeUnavailable, load

try:
    LIBRARY: CDLL | None = load()
except NativeUnavailable:
    LIBRARY = None

needs_native = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")

KERNELS = ("torch", pytest.param("native", marks=needs_native))
"""Parameters of a fixture that takes both in turn."""


def library_of(kernels: str) -> CDLL | None:
    return LIBRARY if kernels == "native" else None
