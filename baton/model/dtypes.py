"""Element types by the names that configurations, checkpoints and KV formats give them."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name, as in `KvPart`."""
    return str(dtype).removeprefix("torch.")
