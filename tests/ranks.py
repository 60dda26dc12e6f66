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


def run_processes(size: int, floats: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `work(collective, *arguments)` in a process of each rank; returns the results in rank order.

    `work` is a function of an importable module. The compute threads of a process serve one call at a time, so that
    forward passes of two ranks in one process would wait for each other for ever.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "baton.native.decoder", "baton.native.packed"])
    fd = shared_memory(size, floats)
    place = f"/proc/{os.getpid()}/fd/{fd}"
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(theirs, place, rank, size, floats, work, arguments), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        results = [_receive(ours) for ours, _ in pipes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        os.close(fd)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(_TIMEOUT_S), "a rank has not ended"
    return pickle.loads(pipe.recv_bytes())


def _rank(
    pipe: Connection,
    place: str,
    rank: int,
    size: int,
    floats: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    fd = os.open(place, os.O_RDWR)
    collective = Collective(fd, rank, size, floats)
    os.close(fd)
    try:
        result = work(collective, *arguments)
    except Exception as error:
        # The others must not wait for this one.
        collective.abort()
        result = RuntimeError(f"rank {rank}: {error!r}")
    # Plain bytes, because torch would send the memory of tensors by descriptor.
    pipe.send_bytes(pickle.dumps(result))
