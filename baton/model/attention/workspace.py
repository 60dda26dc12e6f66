"""Working memory of attention, kept from call to call."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace(threading.local):
    """Named buffers of one thread, each as large as its largest use so far.

    A fresh tensor of megabytes a layer costs more in page faults than the copy into it. What is in a buffer
    lasts until the name is taken again; a larger request leaves earlier views on the memory they had.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """The buffer of that name as an uninitialised `shape`, with the dtype and device of `like`."""
        key, count = (name, like.dtype, like.device), math.prod(shape)
        held = self._buffers.get(key)
        if held is None or held.numel() < count:
            # An inference tensor could not be written outside inference mode later.
            with torch.inference_mode(False):
                held = self._buffers[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return held[:count].view(*shape)
