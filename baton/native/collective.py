"""Exchanges between the ranks of one host, over memory that they share (src/collective.h, src/channel.h).

The leader makes the memory with `shared_memory` or `channel_memory`, and passes its file descriptor to the ranks. Each
tensor-parallel rank opens a Collective over it, for its NativeDecoder, or for torch's layers as a TensorParallel
(`baton.model.layers`). All of them make the same calls in the same order. Two stages of a pipeline open a Channel,
through which hidden states go from one to the next.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.errors import EngineError
from baton.model.layers import TensorParallel
from baton.native.library import load
from baton.native.mapping import shared_file


def exchange_floats(hidden_size: int, library: ctypes.CDLL | None = None) -> int:
    """Number of floats that ranks of a model with this hidden size exchange at once."""
    return int((library or load()).baton_native_rank_floats(hidden_size))


def shared_memory(size: int, floats: int, library: ctypes.CDLL | None = None) -> int:
    """Make memory for the exchanges of `size` ranks, `floats` floats at once; returns its file descriptor (memfd)."""
    return shared_file("baton-ranks", (library or load()).baton_native_collective_bytes(size, floats))


def channel_memory(capacity: int, library: ctypes.CDLL | None = None) -> int:
    """Make memory for a channel with buffers of `capacity` bytes; returns its file descriptor (memfd)."""
    return shared_file("baton-channel", (library or load()).baton_native_channel_bytes(capacity))


class _End:
    """One end of an exchange: what a Collective and a Channel have in common."""

    def __init__(self, kind: str, library: ctypes.CDLL | None, *arguments: int) -> None:
        self._library = library or load()
        self._kind = kind
        self._handle: int | None = self._function("open")(*arguments)
        if self._handle is None:
            raise EngineError(self._error())
        self._unmapping = weakref.finalize(self, self._function("close"), self._handle)
        # At the exit of the process another thread may still be inside a call.
        self._unmapping.atexit = False

    def abort(self) -> None:
        """End all waits of all ends with an error, now and until `reset`."""
        self._function("abort")(self._open())

    @property
    def aborted(self) -> bool:
        """Whether waits end with an error."""
        return bool(self._function("aborted")(self._open()))

    def reset(self) -> None:
        """Make the memory empty, and usable after `abort`, for all ends. No end may be inside a call."""
        self._function("reset")(self._open())

    def close(self) -> None:
        """Unmap the memory, now and not when this end is gone. Nothing may use it during and after this. Idempotent."""
        self._handle = None
        self._unmapping()

    @property
    def waited_s(self) -> float:
        """Seconds that this end has waited for others since it was opened."""
        return float(self._function("waited_ns")(self._open())) / 1e9

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"baton_native_{self._kind}_{name}")

    def _open(self) -> int:
        if self._handle is None:
            raise EngineError(f"the {self._kind} is closed")
        return self._handle

    def _check(self, status: int) -> None:
        if status:
            raise EngineError(self._error())

    def _error(self) -> str:
        return str(self._library.baton_native_error().decode())


class Collective(_End):
    """One rank's end of the exchanges. One thread at a time uses it; any thread may call `abort`.

    Every method that waits for other ranks raises EngineError after `abort`, on all ranks.
    """

    def __init__(self, fd: int, rank: int, size: int, floats: int, library: ctypes.CDLL | None = None) -> None:
        """Map the memory of `shared_memory`, made with the same `size` and `floats`; `fd` may be closed afterwards.

        Raises EngineError.
        """
        super().__init__("collective", library, fd, rank, size, floats)
        self.rank, self.size = rank, size

    @property
    def tensor_parallel(self) -> TensorParallel:
        """This rank's place, with these exchanges, for the layers of a model."""
        return TensorParallel(self.rank, self.size, self.all_reduce, self.all_gather, self.barrier)

    @property
    def address(self) -> int:
        """Address of the `BatonRanks` of native forward passes, which is valid until `close`."""
        return int(self._library.baton_native_collective_ranks(self._open()))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks in float32, in rank order; returns a tensor of its dtype, equal on all ranks."""
        total = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._check(self._library.baton_native_all_reduce(self._open(), total.data_ptr(), total.numel()))
        return total.to(tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Join the ranks' tensors, which have the same shape and dtype, along the last dimension in rank order."""
        own = tensor.contiguous()
        parts = torch.empty((self.size, *own.shape), dtype=own.dtype)
        self._check(self._library.baton_native_all_gather(self._open(), own.data_ptr(), own.nbytes, parts.data_ptr()))
        return torch.cat(tuple(parts), dim=-1)

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self._check(self._library.baton_native_barrier(self._open()))

    @property
    def calls(self) -> int:
        """Number of exchanges that this rank has made since it was opened."""
        return int(self._library.baton_native_collective_calls(self._open()))


class Channel(_End):
    """One end of a channel from one stage of a pipeline to the next; one end sends, and the other receives.

    A message that is sent has been copied: at most two, or two pieces of a long one, wait to be received. One thread at
    a time sends or receives; any thread may call `abort`. Both methods raise EngineError after it, at both ends.
    """

    def __init__(self, fd: int, capacity: int, library: ctypes.CDLL | None = None) -> None:
        """Map the memory of `channel_memory`, made with the same `capacity`; `fd` may be closed afterwards.

        Longer messages than `capacity` bytes go in pieces. Raises EngineError.
        """
        super().__init__("channel", library, fd, capacity)

    def send(self, tensor: Tensor) -> None:
        """Send a tensor on a CPU; waits while two pieces wait to be received."""
        own = tensor.contiguous()
        self._check(self._library.baton_native_channel_send(self._open(), own.data_ptr(), own.nbytes))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Wait for the next tensor, which was sent with this shape and dtype."""
        out = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        self._check(self._library.baton_native_channel_receive(self._open(), out.data_ptr(), out.nbytes))
        return out
