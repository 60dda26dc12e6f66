"""Tensor-parallel ranks of a test: threads or processes, each with its own Collective over one memory."""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from baton.native.collective import Collective, shared_memory

_TIMEOUT_S = 120.0


def run_threads(size: int, floats: int, work: Callable[[Collective], Any]) -> list[Any]:
    """Call `work` on a thread of each rank; returns the results in rank order."""
    fd = shared_memory(size, floats)
    ranks = [Collective(fd, rank, size, floats) for rank in range(size)]
    os.close(fd)
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(work, ranks))
    finally:
        for each in ranks:
            each.close()


class RankProcesses:
    """Processes of ranks, which compute one function after the other.

    They are copies of a process that has imported `module`, where the functions are.

    The compute threads of a process serve one call at a time, so that forward passes of two ranks in one process would
    wait for each other for ever.
    """

    def __init__(self, size: int, floats: int, module: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([module])
        self._fd = shared_memory(size, floats)
        self._own = Collective(self._fd, 0, size, floats)
        place = f"/proc/{os.getpid()}/fd/{self._fd}"
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, place, rank, size, floats), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._own.close()
        os.close(self._fd)

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `work(collective, *arguments)`, a function of an importable module; returns results in rank order."""
        self._own.reset()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((work, arguments)))
        results = [_receive(pipe) for pipe in self._pipes]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(_TIMEOUT_S), "a rank has not ended"
    return pickle.loads(pipe.recv_bytes())


def _serve(pipe: Connection, place: str, rank: int, size: int, floats: int) -> None:
    torch.set_num_threads(1)
    fd = os.open(place, os.O_RDWR)
    collective = Collective(fd, rank, size, floats)
    while True:
        work, arguments = pickle.loads(pipe.recv_bytes())
        try:
            result = work(collective, *arguments)
        except Exception as error:
            # The others must not wait for this one.
            collective.abort()
            result = RuntimeError(f"rank {rank}: {error!r}")
        # Plain bytes, because torch would send the memory of tensors by descriptor.
        pipe.send_bytes(pickle.dumps(result))
