"""Advice to the kernel."""

import mmap
from typing import cast

import pytest

from baton.process.madvise import ask_for_huge_pages


def test_a_kernel_without_huge_pages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        def madvise(self, _: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    ask_for_huge_pages(cast(mmap.mmap, Memory()))
