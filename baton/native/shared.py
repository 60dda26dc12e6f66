"""Packed weights in a file that all workers of a host map, so that they are in memory only once.

    magic ── length of the index ── index: key, tensors, size ── tensors, each at a multiple of 64 bytes ── size

A process that maps the file holds a shared lock on it (flock) until it ends. A process that builds the file holds an
exclusive lock. The kernel frees the locks of a process that is killed. So nobody reads the file while it is built, and
other workers wait for its builder. The magic says "complete" only when everything is written. Until then, the builder's
name and progress stand in the place of the index. A file with another key is not replaced while a process maps it.

The file should be in memory: a memfd, or a file on a tmpfs. It must belong to the user of the worker, and no other user
may write to it, because its contents decide the results of the model.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baton.errors import ConfigError
from baton.native.mapping import populate
from baton.native.packed import LoadedWeight, PackedWeights, write_all
from baton.process.load_progress import LoadProgress
from baton.process.madvise import ask_for_huge_pages

Key = Mapping[str, str]
"""Names and values that decide the contents of a file: two files with equal keys have the same contents."""

_BUILDING, _COMPLETE = b"Baton packed weights: building..\n", b"Baton packed weights: complete..\n"
_PREFIX = struct.Struct(f"<{len(_COMPLETE)}sQ")
_PROGRESS = struct.Struct("<QQQ")
"""Pieces so far, bytes of the checkpoint that are packed, and all of them; a line of JSON with the builder follows."""
_BUILDER_BYTES = 1000
_ALIGNMENT = 64
_MAX_INDEX_BYTES = 64 << 20
_OF_PROCESSES = "/proc/"
"""Beginning of the path of a file that `baton up` holds open."""

_POLL_S, _WAIT_S = 0.02, 60.0
"""Seconds between two looks at a builder, and seconds without progress after which nobody waits for it."""

_log = logging.getLogger(__name__)


class _Unusable(Exception):
    """The file can't be used; the message says why."""


@dataclass(frozen=True, slots=True)
class _Index:
    """The index of a file; `tensors` has the offset and the number of bytes of each tensor, by name."""

    key: dict[str, str]
    tensors: dict[str, tuple[int, int]]
    size: int


@dataclass(frozen=True, slots=True)
class _Builder:
    """The worker that builds a file, in words, and its progress."""

    name: str
    moves: int = 0
    done: int = 0
    total: int = 0


def share_weights(
    path: str,
    key: Key,
    load: Callable[[], Sequence[LoadedWeight]],
    threads: int,
    progress: LoadProgress | None = None,
) -> PackedWeights:
    """Map the packed weights in the file at `path`. If the file does not have this key, build it from `load()` first.

    The weights are packed in memory of this process instead, with a warning, if workers use the file with another key,
    if there is no space for it, or if another worker that builds it makes no progress for a minute. Raises ConfigError
    for a file that can't be opened, belongs to another user, or has other contents. While this worker waits for another
    one, `progress` is that of the other.
    """
    progress = progress or LoadProgress()
    try:
        with _opened(path) as fd:
            try:
                return _weights(fd, path, key, load, threads, progress)
            except BaseException:
                # A mapping that the exception's frames hold would keep the lock.
                fcntl.flock(fd, fcntl.LOCK_UN)
                raise
    except _Unusable as problem:
        _log.warning("packed_weights: %s: %s; this worker holds a copy of its own", path, problem)
    except OSError as error:
        if not path.startswith(_OF_PROCESSES):
            reason = "is a symbolic link" if error.errno == errno.ELOOP else error.strerror or error
            raise ConfigError(f"packed_weights: {path}: {reason}") from error
        # Nobody named this file: `baton up` holds it open, and a sandbox may not let its children open it.
        _log.warning("packed_weights: %s: %s; this worker holds a copy of its own", path, error.strerror or error)
    return PackedWeights.private(load(), threads)


def _weights(
    fd: int,
    path: str,
    key: Key,
    load: Callable[[], Sequence[LoadedWeight]],
    threads: int,
    progress: LoadProgress,
) -> PackedWeights:
    while True:
        built = False
        if _lock(fd, fcntl.LOCK_EX):
            index = _read(fd, path)
            if index is None or index.key != key:
                began = time.monotonic()
                size = _build(fd, key, load(), threads, progress)
                seconds = time.monotonic() - began
                _log.info("packed weights: %d MiB packed into %s in %.1f s", size >> 20, _describe(path), seconds)
                built = True
        # Between the two locks another worker may have built the file with another key.
        _wait_shared(fd, path, progress)
        index = _read(fd, path)
        if index is not None and index.key == key:
            if not built:
                _log.info("packed weights: %d MiB mapped from %s", index.size >> 20, _describe(path))
            return _map(fd, index)
        if index is not None:
            differs = [
                f"{name} {index.key.get(name)}, not {key[name]}" for name in key if index.key.get(name) != key[name]
            ]
            raise _Unusable(f"other workers use it, with {', '.join(differs)}")
        # The builder has died before the file was complete.
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    # The path of a file that `baton up` holds open is a link. Without O_NONBLOCK, a pipe would wait for its other end.
    links = 0 if path.startswith(_OF_PROCESSES) else os.O_NOFOLLOW
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | links, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"packed_weights: {path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise ConfigError(f"packed_weights: {path} belongs to another user, uid {found.st_uid}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(found.st_mode)
            raise ConfigError(f"packed_weights: {path} can be written by other users, its mode is {mode:o}: chmod 600")
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_shared(fd: int, path: str, progress: LoadProgress) -> None:
    """Take the shared lock. Raises _Unusable if the builder makes no progress for too long."""
    seen, moved_at = _Builder("", moves=-1), time.monotonic()
    while not _lock(fd, fcntl.LOCK_SH):
        builder, now = _read_builder(fd) or seen, time.monotonic()
        step = f"waiting for {builder.name or 'another worker'}, which packs the weights into {_describe(path)}"
        if (builder.name, builder.total) != (seen.name, seen.total):
            progress.begin(step, builder.total, done=builder.done)
        if builder.name != seen.name:
            _log.info("%s", step)
        if builder != seen:
            seen, moved_at = builder, now
            progress.advance(builder.done)
        elif now - moved_at > _WAIT_S:
            raise _Unusable(f"{builder.name or 'another worker'} builds it, with no progress for {_WAIT_S:g} s")
        time.sleep(_POLL_S)


def _describe(path: str) -> str:
    """The file in words."""
    if not path.startswith(_OF_PROCESSES):
        return path
    process = path.removeprefix(_OF_PROCESSES).partition("/")[0]
    return f"the memory that `baton up` shares (process {process})"


def _read_builder(fd: int) -> _Builder | None:
    """The builder of the file; None if it has just begun, or is about to end."""
    found = os.pread(fd, len(_BUILDING) + _PROGRESS.size + _BUILDER_BYTES, 0)
    try:
        numbers = _PROGRESS.unpack_from(found, len(_BUILDING))
        about = json.loads(found[len(_BUILDING) + _PROGRESS.size :].partition(b"\n")[0])
        return _Builder(str(about["builder"]), *numbers)
    except (ValueError, KeyError, TypeError, struct.error):
        return None


def _write_builder(fd: int, progress: LoadProgress) -> None:
    """Name this worker in the file as its builder, and from now on write its progress there."""
    own = f"worker {progress.owner}" if progress.owner else "a worker"
    about = json.dumps({"builder": f"{own} (process {os.getpid()} on {socket.gethostname()})"}).encode() + b"\n"
    numbers = bytes(_PROGRESS.size)
    os.pwrite(fd, numbers + about[:_BUILDER_BYTES], len(_BUILDING))

    def publish() -> None:
        os.pwrite(fd, _PROGRESS.pack(progress.moves, progress.done, progress.total), len(_BUILDING))

    progress.publish = publish


def _read(fd: int, path: str) -> _Index | None:
    """Read the index of a complete file; None if it is not complete. Raises ConfigError for another kind of file."""
    size = os.fstat(fd).st_size
    start = os.pread(fd, _PREFIX.size, 0)
    if start[: len(_COMPLETE)] not in (_BUILDING[: len(start)], _COMPLETE[: len(start)]):
        raise ConfigError(f"packed_weights: {path} is not a file of packed weights; remove it, or name another")
    if len(start) < _PREFIX.size or start.startswith(_BUILDING):
        return None
    length = _PREFIX.unpack(start)[1]
    try:
        content: dict[str, Any] = json.loads(os.pread(fd, min(length, _MAX_INDEX_BYTES), _PREFIX.size))
        index = _Index(content["key"], {name: tuple(at) for name, at in content["tensors"].items()}, content["size"])
        whole = index.size <= size and all(at >= 0 and at + count <= size for at, count in index.tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return index if whole else None


def _build(fd: int, key: Key, weights: Sequence[LoadedWeight], threads: int, progress: LoadProgress) -> int:
    """Fill the file; returns its size in bytes. Raises _Unusable if there is no space; then the file is empty."""
    # 20 digits hold any offset, so that the length of the index is known before the offsets are.
    end = _PREFIX.size + len(_encode(key, {weight.name: (10**19, 10**19) for weight in weights}, 10**19))
    tensors = {}
    for weight in weights:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        tensors[weight.name] = start, weight.elements * weight.dtype.itemsize
        end = sum(tensors[weight.name])
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, _BUILDING, 0)
        os.ftruncate(fd, end)
        memory = mmap.mmap(fd, end)
        ask_for_huge_pages(memory)
        _write_builder(fd, progress)
        # Without space, a write to the mapping would end the process with SIGBUS.
        _commit(fd, memory, threads, progress)
    except OSError as error:
        progress.publish = lambda: None
        os.ftruncate(fd, 0)
        # The call fails with EFAULT where a write would get SIGBUS.
        reason = os.strerror(errno.ENOSPC if error.errno == errno.EFAULT else error.errno or 0)
        raise _Unusable(f"there is no space for {end >> 20} MiB ({reason})") from None
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    dtypes = {weight.name: weight.dtype for weight in weights}

    def memory_of(name: str) -> torch.Tensor:
        start, size = tensors[name]
        return whole[start : start + size].view(dtypes[name])

    try:
        write_all(weights, memory_of, threads)
    finally:
        progress.publish = lambda: None
    index = _encode(key, tensors, end)
    os.pwrite(fd, struct.pack("<Q", len(index)) + index, len(_BUILDING))
    os.pwrite(fd, _COMPLETE, 0)
    return end


def _commit(fd: int, memory: mmap.mmap, threads: int, progress: LoadProgress) -> None:
    """Allocate all memory of the file. Raises OSError if there is none."""
    size = len(memory)
    if not _is_in_memory(fd):
        # Page faults take a third of the time where the blocks are there.
        os.posix_fallocate(fd, 0, size)
    with progress.aside("allocating memory for the packed weights", size):
        try:
            populate(_address(memory), size, write=True, threads=threads, report=progress.add)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.posix_fallocate(fd, 0, size)


def _is_in_memory(fd: int) -> bool:
    """Whether the file is a memfd or on a tmpfs; only these have seals."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _encode(key: Key, tensors: Mapping[str, tuple[int, int]], size: int) -> bytes:
    return json.dumps({"key": dict(key), "tensors": tensors, "size": size}).encode()


def _map(fd: int, index: _Index) -> PackedWeights:
    """Map the file read-only. The mapping has a duplicate of `fd`, and so holds the shared lock as long as it lives."""
    memory = mmap.mmap(fd, index.size, prot=mmap.PROT_READ)
    ask_for_huge_pages(memory)
    first = _address(memory)
    with contextlib.suppress(OSError):
        populate(first, index.size, write=False)
    addresses = {name: first + start for name, (start, _) in index.tensors.items()}
    return PackedWeights(addresses, memory, sum(count for _, count in index.tensors.values()))


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
