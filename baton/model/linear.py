"""Storages of linears: the checkpoint tensors of a weight, their layout in memory, and the product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import ModelError


@dataclass(frozen=True)
class TensorOptions:
    """Dtype and device of weights and of the computation.

    If `repacked`, all linears and embeddings are packed after loading (baton.native). Until then they have no memory of
    their own, only views of files.
    """

    dtype: torch.dtype
    device: torch.device
    repacked: bool = False

    def empty(self, *shape: int) -> nn.Parameter:
        """An uninitialised weight."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)

    def empty_linear(self, *shape: int) -> nn.Parameter:
        """An uninitialised weight of a linear or an embedding; without memory if it will be repacked."""
        return replace(self, device=torch.device("meta")).empty(*shape) if self.repacked else self.empty(*shape)


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
        self.weight = options.empty_linear(rows, columns)
        self.views: list[tuple[int, Tensor]] = []
        """Views of files, each with its first row in the weight, if it will be repacked."""
        self.bias = options.empty(rows) if bias else None
        self._repacked = options.repacked

    def load(self, name: str, row: int, tensor: Tensor) -> None:
        """Fill the rows of one of `tensors` from `row` on, cast to the storage's dtype.

        A weight that will be repacked is not copied: it joins `views`.
        """
        target = {"weight": self.weight, "bias": self.bias}[name]
        if target is None:
            raise ModelError("this linear has no bias to load")
        if target is self.weight and self._repacked:
            self.views.append((row, tensor))
        else:
            target[row : row + len(tensor)].copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, columns]` to `[tokens, rows]`, both in the dtype of the weight."""
        return F.linear(x, self.weight, self.bias)
