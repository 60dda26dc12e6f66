"""The loading of weights from safetensors files into a decoder.

Files are memory-mapped. A weight that is packed for native kernels stays a view of its file until then. Every other
tensor is copied to its place, in its final dtype. So loading never needs memory for more than the final weights and one
tensor. The checkpoint must contain exactly the tensors of the model. A missing or unknown tensor, or one of a
wrong shape, is an error that names it, because a model without one of its biases would be silently wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.errors import ModelError
from baton.model.checkpoint import weight_files
from baton.model.decoder import CheckpointTensor, Decoder
from baton.model.layers import TensorParallel
from baton.process.load_progress import PIECE, LoadProgress
from baton.process.madvise import populate_file

_COMPARED_ROWS = 4096
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Sizes of elements by their names in safetensors files."""


class Checkpoint:
    """The tensors of a checkpoint directory by name, from all its files.

    Raises ModelError with the file that is missing, truncated or not a safetensors file.
    """

    def __init__(self, directory: Path, progress: LoadProgress) -> None:
        self._progress = progress
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._bytes: dict[str, int] = {}
        for path in weight_files(directory):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    self._files[name] = path
                    tensor = file.get_slice(name)
                    self.shapes[name] = tuple(tensor.get_shape())
                    self._bytes[name] = math.prod(self.shapes[name]) * _ITEM_BYTES.get(tensor.get_dtype(), 1)

    def check(self, tensors: Iterable[CheckpointTensor]) -> None:
        """Raise ModelError for the first tensor that is missing or not of its expected shape."""
        for tensor in tensors:
            found = self.shapes.get(tensor.name)
            if found is None:
                raise ModelError(f"checkpoint lacks tensor {tensor.name} of shape {list(tensor.shape)}")
            if found != tensor.shape:
                file = self._files[tensor.name].name
                raise ModelError(
                    f"tensor {tensor.name} in {file}: expected shape {list(tensor.shape)}, found {list(found)}"
                )

    def begin(self, step: str, tensors: Iterable[CheckpointTensor]) -> None:
        """Begin a step of the progress that reads these tensors."""
        files: dict[str, int] = {}
        for tensor in tensors:
            file = self._files[tensor.name].name
            files[file] = files.get(file, 0) + self._bytes[tensor.name]
        self._progress.begin(step, sum(files.values()), files)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor as a view of its file, or a copy of some of its rows; on the CPU, in the checkpoint's dtype.

        The file is mapped again for each tensor, so that its pages leave memory with the tensor.
        """
        path = self._files[name]
        with _opened(path) as file:
            tensor: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelError(f"tensor {name} in {path.name}: unsupported dtype {tensor.dtype}")
        self._progress.place(tensor.untyped_storage().data_ptr(), path.name)
        return tensor


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error


@torch.inference_mode()
def load_weights(decoder: Decoder, directory: Path, progress: LoadProgress) -> None:
    """Fill all weights of `decoder` from the checkpoint in `directory`; those that are packed later are views of it.

    `progress` counts the tensors that are read; views count when they are packed. Raises ModelError, before any tensor
    is read, unless the checkpoint contains exactly the model's tensors.
    """
    checkpoint = Checkpoint(directory, progress)
    tensors = list(decoder.checkpoint_tensors())
    tied = decoder.head is not None and _is_tied(decoder, checkpoint)
    if decoder.head is not None and not tied:
        # The largest tensors go first, while little else is in memory.
        tensors.insert(0, decoder.head_tensor())
    checkpoint.check(tensors)
    _refuse_unknown(decoder, checkpoint)
    packed = decoder.options.repacked
    checkpoint.begin("reading and packing the weights" if packed else "reading the weights", tensors)
    for tensor in tensors:
        found = checkpoint.read(tensor.name)
        # All matrices are packed, and all else is copied.
        if not (packed and found.ndim > 1):
            bring_pieces(found, progress)
        tensor.load(found)
    if tied and decoder.head is not None and decoder.embedding is not None:
        # Loading may have given the embedding another tensor.
        decoder.head.tie(decoder.embedding)


def bring_pieces(tensor: Tensor, progress: LoadProgress) -> None:
    """Bring a view of a file into memory, and count its bytes."""
    for start in range(0, tensor.nbytes, PIECE):
        size = min(PIECE, tensor.nbytes - start)
        populate_file(tensor.data_ptr() + start, size, min(PIECE, tensor.nbytes - start - size))
        progress.add(size, address=tensor.untyped_storage().data_ptr())


def _refuse_unknown(decoder: Decoder, checkpoint: Checkpoint) -> None:
    whole = Decoder(decoder.config, replace(decoder.options, device=torch.device("meta")), TensorParallel())
    known = {tensor.name for tensor in (*whole.checkpoint_tensors(), whole.head_tensor())}
    ignorable = decoder.config.family.names.ignorable
    unknown = sorted(name for name in checkpoint.shapes.keys() - known if not name.endswith(ignorable))
    if unknown:
        raise ModelError(
            f"checkpoint holds {len(unknown)} tensors unknown to {decoder.config.architecture}: {unknown[0]}"
        )


def _is_tied(decoder: Decoder, checkpoint: Checkpoint) -> bool:
    """Whether the output projection is the embedding.

    A tied checkpoint may contain the projection too. As in transformers, it is used if it differs from the embedding.
    They are compared in blocks of rows, so that neither is in memory as a whole.
    """
    if not decoder.config.tie_word_embeddings:
        return False
    head = decoder.head_tensor()
    embed = f"{decoder.config.family.names.embed}.weight"
    if checkpoint.shapes.get(head.name) != head.shape or checkpoint.shapes.get(embed) != head.shape:
        return True
    blocks = (slice(row, row + _COMPARED_ROWS) for row in range(0, head.shape[0], _COMPARED_ROWS))
    return all(torch.equal(checkpoint.read(head.name, rows), checkpoint.read(embed, rows)) for rows in blocks)
