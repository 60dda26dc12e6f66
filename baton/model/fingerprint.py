"""The model fingerprint: two workers may exchange KV only if theirs are equal.

It covers everything that determines a token's K and V: the architecture's numbers, RoPE and windows, the contents of
the weights, and the compute dtype. It does not cover names, paths, or the split of a checkpoint into files.

Hashing gigabytes at every start would be slow, so each file's digest is kept in the user's cache folder, by path, size,
modification time and inode. Damaged entries, and a folder that can't be written, are ignored.

No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from io import FileIO
from pathlib import Path

from baton.errors import ModelError
from baton.model.checkpoint import weight_files
from baton.model.config import ModelConfig
from baton.process.load_progress import PIECE, LoadProgress

_VERSION = 2
_NOT_HASHED = ("eos_token_ids", "bos_token_id", "dtype", "layers")
"""Fields of ModelConfig that do not change K or V, and the layers: their windows are hashed, and their kinds follow
from the architecture's name."""


def model_fingerprint(
    config: ModelConfig,
    weights_digest: str,
    compute_dtype: str,
) -> str:
    """SHA-256, in hex, of canonical JSON of everything that determines a token's K and V."""
    architecture = {name: value for name, value in asdict(config).items() if name not in _NOT_HASHED}
    architecture |= {"num_layers": config.num_layers, "windows": config.windows}
    content = {
        "version": _VERSION,
        "architecture": architecture,
        "weights": weights_digest,
        "compute_dtype": compute_dtype,
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def weights_digest(directory: Path, progress: LoadProgress | None = None) -> str:
    """SHA-256, in hex, of the contents of the weight files, but not of their names. Raises ModelError."""
    files, progress = weight_files(directory), progress or LoadProgress()
    sizes = {file.name: file.stat().st_size for file in files}
    progress.begin("hashing the weights", sum(sizes.values()), sizes)
    with ThreadPoolExecutor(max_workers=min(4, len(files))) as pool:
        digests = sorted(pool.map(partial(_file_digest, progress=progress), files))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def cache_folder() -> Path:
    """The folder of cached digests: `baton/weights` under XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton" / "weights"


def _file_digest(path: Path, progress: LoadProgress) -> str:
    try:
        real = path.resolve(strict=True)
        with real.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            key = f"{real}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ino}"
            known = _recall(key)
            if known is not None:
                progress.add(status.st_size, path.name)
                return known
            digest = _hash(file, lambda count: progress.add(count, path.name))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    _remember(key, digest)
    return digest


def _hash(file: FileIO, report: Callable[[int], None]) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
        report(count)
    return digest.hexdigest()


def _entry(key: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _recall(key: str) -> str | None:
    try:
        entry = json.loads(_entry(key).read_text(encoding="utf-8"))
        digest = entry["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    intact = entry.get("key") == key and isinstance(digest, str) and len(digest) == 64
    return digest if intact else None


def _remember(key: str, digest: str) -> None:
    """Write a temporary file and rename it, so that a reader never sees a partial entry."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        entry = _entry(key)
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=entry.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"key": key, "sha256": digest}, file)
            os.replace(temporary, entry)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
