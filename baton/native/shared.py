"""Packed weights in a file that all workers of a host map, so that they are in memory only once.

    magic ── length of the index ── index: key, tensors, size ── tensors, each at a multiple of 64 bytes ── size

A process that maps the file holds a shared lock on it (flock) until it ends. A process that builds the file holds an
exclusive lock. The kernel frees the locks of a process that is killed. So nobody reads the file while it is built, and
other workers wait for its builder. The magic says "complete" only when everything is written. A file with another key
is not replaced while a process maps it.

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
from baton.native.packed import LoadedWeight, PackedWeights
from baton.process.madvise import ask_for_huge_pages

Key = Mapping[str, str]
"""Names and values that decide the contents of a file: two files with equal keys have the same contents."""

_BUILDING, _COMPLETE = b"Baton packed weights: building..\n", b"Baton packed weights: complete..\n"
_PREFIX = struct.Struct(f"<{len(_COMPLETE)}sQ")
_ALIGNMENT = 64
_MAX_INDEX_BYTES = 64 << 20
_OF_PROCESSES = "/proc/"
"""Beginning of the path of a file that `baton up` holds open."""

_POLL_S, _SAY_S, _WAIT_S = 0.02, 30.0, 300.0

_log = logging.getLogger(__name__)


class _Unusable(Exception):
    """The file can't be used; the message says why."""


@dataclass(frozen=True, slots=True)
class _Index:
    """The index of a file; `tensors` has the offset and the number of bytes of each tensor, by name."""

    key: dict[str, str]
    tensors: dict[str, tuple[int, int]]
    size: int


def share_weights(path: str, key: Key, load: Callable[[], Sequence[LoadedWeight]], threads: int) -> PackedWeights:
    """Map the packed weights in the file at `path`. If the file does not have this key, build it from `load()` first.

    The weights are packed in memory of this process instead, with a warning, if workers use the file with another key,
    if there is no space for it, or if another worker builds it for more than 5 minutes. Raises ConfigError for a file
    that can't be opened, belongs to another user, or has other contents.
    """
    try:
        with _opened(path) as fd:
            try:
                return _weights(fd, path, key, load, threads)
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
    return PackedWeights.private(load())


def _weights(fd: int, path: str, key: Key, load: Callable[[], Sequence[LoadedWeight]], threads: int) -> PackedWeights:
    deadline = time.monotonic() + _WAIT_S
    while True:
        built = False
        if _lock(fd, fcntl.LOCK_EX):
            index = _read(fd, path)
            if index is None or index.key != key:
                began = time.monotonic()
                size = _build(fd, key, load(), threads)
                _log.info("packed weights: %d MiB built in %s in %.1f s", size >> 20, path, time.monotonic() - began)
                built = True
        # Between the two locks another worker may have built the file with another key.
        _wait_shared(fd, path, deadline)
        index = _read(fd, path)
        if index is not None and index.key == key:
            if not built:
                _log.info("packed weights: %d MiB mapped from %s", index.size >> 20, path)
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


def _wait_shared(fd: int, path: str, deadline: float) -> None:
    """Take the shared lock. Raises _Unusable at the deadline."""
    say = time.monotonic()
    while not _lock(fd, fcntl.LOCK_SH):
        now = time.monotonic()
        if now > deadline:
            raise _Unusable(f"another worker has been building it for {_WAIT_S:g} s")
        if now >= say:
            _log.info("packed weights: another worker builds %s; waiting for it", path)
            say = now + _SAY_S
        time.sleep(_POLL_S)


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


def _build(fd: int, key: Key, weights: Sequence[LoadedWeight], threads: int) -> int:
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
        # Without space, a write to the mapping would end the process with SIGBUS.
        _commit(fd, memory, threads)
    except OSError as error:
        os.ftruncate(fd, 0)
        # The call fails with EFAULT where a write would get SIGBUS.
        reason = os.strerror(errno.ENOSPC if error.errno == errno.EFAULT else error.errno or 0)
        raise _Unusable(f"there is no space for {end >> 20} MiB ({reason})") from None
    for weight in weights:
        start, _ = tensors[weight.name]
        weight.write(torch.frombuffer(memory, dtype=weight.dtype, count=weight.elements, offset=start))
    index = _encode(key, tensors, end)
    os.pwrite(fd, struct.pack("<Q", len(index)) + index, len(_BUILDING))
    os.pwrite(fd, _COMPLETE, 0)
    return end


def _commit(fd: int, memory: mmap.mmap, threads: int) -> None:
    try:
        populate(_address(memory), len(memory), write=True, threads=threads)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(fd, 0, len(memory))


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
