"""Element types by the names that configurations, checkpoints and KV formats give them."""

from __future__ import annotations

import warnings

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name, as in `KvPart`."""
    return str(dtype).removeprefix("torch.")


with warnings.catch_warnings():
    # Torch warns once a process of a buffer that must not be written to. Received buffers are only read.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)
