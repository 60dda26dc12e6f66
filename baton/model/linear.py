"""Storages of linears: the layout of a weight in memory, and the products with it.

A storage says which tensors of a checkpoint make up a linear's weight (`WeightTensor`), takes them, and is then asked
for the storage to compute with: `DenseStorage` returns a `PackedStorage` on a CPU with oneDNN, elsewhere itself. All
storages multiply, and can put what surrounds a product in a decoder into the same pass: an activation, a product, a
residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import ModelError

_ROWS = 32
"""The number of rows for which oneDNN is asked to lay out a weight. Its choices for 8, 16, 32, 64 and 256 were equally
quick at 1 to 1,024 rows, that for 1 slower at more than 128 (bench/results/engine.json tells of the machine)."""


@dataclass(frozen=True)
class TensorOptions:
    """Dtype and device that weights are kept in and computed with.

    `repacked`: all linears are laid out anew once they are loaded (baton.native), so they may be views of files.
    """

    dtype: torch.dtype
    device: torch.device
    repacked: bool = False

    def empty(self, *shape: int) -> nn.Parameter:
        """An uninitialised weight."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


class Module(nn.Module):
    """A module without torch's hooks: a call is one of `forward`, and parameters and parts are plain attributes.

    A decode step calls some 200 modules and reads some 500 such attributes; torch's own ways to them are slower than
    many a kernel.
    """

    def __init_subclass__(cls) -> None:
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def _apply(self, fn: Any, recurse: bool = True) -> Module:
        # Torch may put new parameters in the place of those that it moves or casts.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.__dict__.update(self._parameters)
        return self


@dataclass(frozen=True)
class WeightTensor:
    """One of the checkpoint's tensors for a linear.

    `name` follows the linear's name in the checkpoint ("weight"). `shape` is that of the whole tensor. `row_dim` and
    `column_dim` are the dimensions that run along the linear's output rows and input columns, and along which the
    ranks split the tensor; None where there is none.
    """

    name: str
    shape: tuple[int, ...]
    row_dim: int | None
    column_dim: int | None


class DenseStorage(Module):
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
        """Fill the rows of a tensor of `tensors` from `row` on, casting to the storage's dtype.

        A whole weight that is to be packed is not copied before: until then the storage is a view of the file.
        """
        target = {"weight": self.weight, "bias": self.bias}[name]
        if target is None:
            raise ModelError("this linear has no bias to load")
        replaced = self._repacked or packs(self.weight)
        if target is self.weight and replaced and tensor.is_contiguous() and _alike(tensor, target):
            self.weight = nn.Parameter(tensor, requires_grad=False)
        else:
            target[row : row + len(tensor)].copy_(tensor)

    def process_weights_after_loading(self) -> Storage:
        """The storage to compute with, now that all is loaded; this one is then to be dropped."""
        return PackedStorage(self) if packs(self.weight) else self

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, columns]` to `[tokens, rows]`."""
        return F.linear(x, self.weight, self.bias)

    def forward_silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        return F.silu(self(x), inplace=True)

    def forward_mul(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times `factor` `[tokens, rows]`, element by element."""
        product: Tensor = self(x)
        return product.mul_(factor)

    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus `residual` `[tokens, rows]`."""
        product: Tensor = self(x)
        return product.add_(residual)


class PackedStorage(Module):
    """A weight in the blocked layout that oneDNN's kernels read, reordered once; for CPUs.

    oneDNN's post-operations apply what is fused to the float32 accumulators, so that bfloat16 rounds once
    (https://uxlfoundation.github.io/oneDNN/dev_guide_attributes_post_ops.html). The operators are those that torch's
    own compiler calls for linears with constant weights.
    """

    def __init__(self, dense: DenseStorage) -> None:
        super().__init__()
        self.rows, self.columns = dense.weight.shape
        self.dtype = dense.weight.dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(dense.weight.detach(), _ROWS)
        self.bias = dense.bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_with = torch.ops.mkldnn._linear_pointwise.binary

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, as read by a product."""
        return int(self.rows * self.columns * self.dtype.itemsize)

    @property
    def tiled(self) -> bool:
        """Whether oneDNN multiplies it with AMX tiles."""
        return self.dtype == torch.bfloat16 and bool(torch.cpu._is_amx_tile_supported())

    def process_weights_after_loading(self) -> Storage:
        """Itself."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        """See DenseStorage."""
        product: Tensor = self._linear(x, self.weight, self.bias, "none", [], "")
        return product

    def forward_silu(self, x: Tensor) -> Tensor:
        """See DenseStorage."""
        product: Tensor = self._linear(x, self.weight, self.bias, "swish", [], "")
        return product

    def forward_mul(self, x: Tensor, factor: Tensor) -> Tensor:
        """See DenseStorage."""
        product: Tensor = self._linear_with(x, factor, self.weight, self.bias, "mul")
        return product

    def forward_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See DenseStorage."""
        product: Tensor = self._linear_with(x, residual, self.weight, self.bias, "add")
        return product


Storage = DenseStorage | PackedStorage


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def packs(weight: Tensor) -> bool:
    """Whether this machine's oneDNN has kernels for a linear of the weight's device and dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32
