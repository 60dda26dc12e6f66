"""Storages of linears: the checkpoint tensors of a weight, their layout in memory, and the product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import ModelError


@dataclass(frozen=True)
class TensorOptions:
    """Dtype and device of weights and of the computation.

    If `repacked`, all linears are packed after loading (baton.native), so they may be views of files until then.
    """

    dtype: torch.dtype
    device: torch.device
    repacked: bool = False

    def empty(self, *shape: int) -> nn.Parameter:
        """An uninitialised weight."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True)
class WeightTensor:
    """One of the checkpoint's tensors for a linear.

    `name` follows the linear's name in the checkpoint ("weight"). `shape` is the shape of the whole tensor. `row_dim`
    and `column_dim` are its dimensions of output rows and of input columns, along which ranks split it, or None.
    """

    name: str
    shape: tuple[int, ...]
    row_dim: int | None
    column_dim: int | None


class DenseStorage(nn.Module):
    """A weight `[rows, columns]` as the checkpoint has it, with an optional bias `[rows]`."""

    @staticmethod
    def tensors(rows: int, columns: int, bias: bool) -> tuple[WeightTensor, ...]:
        """The tensors of a linear of `rows` outputs and `columns` inputs."""
        weight = WeightTensor("weight", (rows, columns), row_dim=0, column_dim=1)
        return (weight, WeightTensor("bias", (rows,), row_dim=0, column_dim=None)) if bias else (weight,)

    def __init__(self, rows: int, columns: int, bias: bool, options: TensorOptions) -> None:
        super().__init__()
        self.weight = options.empty(rows, columns)
        self.bias = options.empty(rows) if bias else None
        self._repacked = options.repacked

    def load(self, name: str, row: int, tensor: Tensor) -> None:
        """Fill the rows of one of `tensors` from `row` on, cast to the storage's dtype.

        A whole weight that will be repacked is not copied: until then the storage is a view of the file.
        """
        target = {"weight": self.weight, "bias": self.bias}[name]
        if target is None:
            raise ModelError("this linear has no bias to load")
        alike = (tensor.shape, tensor.dtype, tensor.device) == (target.shape, target.dtype, target.device)
        if target is self.weight and self._repacked and alike and tensor.is_contiguous():
            self.weight = nn.Parameter(tensor, requires_grad=False)
        else:
            target[row : row + len(tensor)].copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, columns]` to `[tokens, rows]`, both in the dtype of the weight."""
        return F.linear(x, self.weight, self.bias)
