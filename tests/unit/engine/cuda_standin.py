"""torch.cuda's streams, events, pinned memory and graphs, acted out on a CPU.

They show that our code calls them as they are meant, and that a captured step follows tensors alone; that kernels and
copies of a GPU are in the right order they can't show: tests/gpu runs those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.model.attention.flash_backend import FlashAttention
from tests.unit.model.flash_standin import KERNELS


class Graph(TorchDispatchMode):
    """Keeps operations with the very tensors that they took; `replay` does them again, whatever the host knows."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, out in self._calls:
            for kept, made in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != made.data_ptr():
                    kept.copy_(made)


class Stream:
    """Everything on it is done already."""

    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        assert event.recorded


class Event:
    """Waiting for what was not recorded is a mistake: torch returns at once."""

    def __init__(self, blocking: bool = False) -> None:
        self.recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


class Cuda:
    """Stand-in for torch.cuda; `current` is this thread's stream."""

    def __init__(self) -> None:
        self.current = self.main = Stream()
        self.sync_mode = "default"
        self.captures = 0
        self.capture_error: RuntimeError | None = None

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Graph, *, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        """As torch's: the stream stays current when the end of the capture fails."""
        before, self.current = self.current, stream
        self.captures += 1
        with graph:
            yield
        if self.capture_error is not None:
            raise self.capture_error
        self.current = before

    def set_sync_debug_mode(self, mode: str) -> None:
        self.sync_mode = mode


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Puts the stand-ins in place."""
    made, empty = Cuda(), torch.empty
    for name in ("stream", "graph", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    return made


FLASH = FlashAttention(KERNELS)
