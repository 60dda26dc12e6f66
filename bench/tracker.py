"""How much memory tensors take: torch reports no peak on a CPU."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 1 << 20
_LIFT = torch.ops.aten.lift_fresh.default

Result = TypeVar("Result")


class Tracker(TorchDispatchMode):
    """Bytes of the storages that operators make while this is entered: now, and at most.

    `at_peak` lists operator, shape and MiB of what lived at the peak, largest first. What an operator takes and frees
    inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.at_peak: list[tuple[str, list[int], float]] = []
        self._alive: dict[int, tuple[str, list[int], int]] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count each storage of its results that none of its arguments has."""
        # `torch.tensor` fills its result before the only operator of which it is the argument.
        known = () if func is _LIFT else (args, *(kwargs or {}).values())
        given = {_storage(x)._cdata for x in _tensors(known)}
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors((results,)):
            if _storage(tensor)._cdata not in given:
                self._add(str(func), tensor)
        if self.now > self.peak:
            self.peak = self.now
            alive = sorted(self._alive.values(), key=lambda each: -each[2])
            self.at_peak = [(name, shape, size / MIB) for name, shape, size in alive]
        return results

    def _add(self, name: str, tensor: Tensor) -> None:
        storage = _storage(tensor)
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: object) -> None:
            self.now -= self._alive.pop(key)[2]
            del self._refs[key]

        self._alive[key] = (name, list(tensor.shape), size)
        self._refs[key] = weakref.ref(storage, freed)
        self.now += size


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def track(run: Callable[[], Result]) -> tuple[Result, Tracker, dict[str, float]]:
    """Its result, the tensors it made, and its `clocked` times, which the count of tensors makes longer."""
    with torch.inference_mode(), Tracker() as tracker:
        result, times = clocked(run)
        return result, tracker, times


def clocked(run: Callable[[], Result]) -> tuple[Result, dict[str, float]]:
    """Its result, its `seconds`, and the `cpu_seconds` of all threads, which other processes disturb less."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return result, {"seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3)}
