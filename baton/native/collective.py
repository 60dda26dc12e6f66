"""Exchanges between the tensor-parallel ranks of one host, over memory that they share (src/collective.h).

The leader makes the memory with `shared_memory` and passes its file descriptor to the other ranks. Each rank opens a
Collective over it, and gives it to its NativeDecoder, or its methods to `baton.model.layers.TensorParallel`. All ranks
make the same calls in the same order.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from baton.errors import EngineError
from baton.native.library import load


def exchange_floats(hidden_size: int, library: ctypes.CDLL | None = None) -> int:
    """Number of floats that ranks of a model with this hidden size exchange at once."""
    return int((library or load()).baton_native_rank_floats(hidden_size))


def shared_memory(size: int, floats: int, library: ctypes.CDLL | None = None) -> int:
    """Make memory for the exchanges of `size` ranks, `floats` floats at once; returns its file descriptor (memfd)."""
    fd = os.memfd_create("baton-ranks")
    try:
        os.ftruncate(fd, (library or load()).baton_native_collective_bytes(size, floats))
    except OSError:
        os.close(fd)
        raise
    return fd


class Collective:
    """One rank's end of the exchanges. One thread at a time uses it; any thread may call `abort`.

    Every method that waits for other ranks raises EngineError after `abort`, on all ranks.
    """

    def __init__(self, fd: int, rank: int, size: int, floats: int, library: ctypes.CDLL | None = None) -> None:
        """Map the memory of `shared_memory`, made with the same `size` and `floats`; `fd` may be closed afterwards.

        Raises EngineError.
        """
        self.rank, self.size = rank, size
        self._library = library or load()
        self._handle: int | None = self._library.baton_native_collective_open(fd, rank, size, floats)
        if self._handle is None:
            raise EngineError(self._error())

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

    def abort(self) -> None:
        """End all waits of all ranks with an error, now and until `reset`."""
        self._library.baton_native_collective_abort(self._open())

    @property
    def aborted(self) -> bool:
        """Whether waits end with an error."""
        return bool(self._library.baton_native_collective_aborted(self._open()))

    def reset(self) -> None:
        """Make the memory usable after `abort`, for all ranks. No rank may be inside a call."""
        self._library.baton_native_collective_reset(self._open())

    def close(self) -> None:
        """Unmap the memory. Nothing may use the collective during and after this."""
        if self._handle is not None:
            self._library.baton_native_collective_close(self._handle)
            self._handle = None

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others since it was opened."""
        return float(self._library.baton_native_collective_waited_ns(self._open())) / 1e9

    @property
    def calls(self) -> int:
        """Number of exchanges that this rank has made since it was opened."""
        return int(self._library.baton_native_collective_calls(self._open()))

    def _open(self) -> int:
        if self._handle is None:
            raise EngineError("the ranks' collective is closed")
        return self._handle

    def _check(self, status: int) -> None:
        if status:
            raise EngineError(self._error())

    def _error(self) -> str:
        return str(self._library.baton_native_error().decode())
