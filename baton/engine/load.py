"""`load_model`: makes a model that can compute from a checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from baton.engine.pipeline import NativeStageDecoder, StageDecoder
from baton.kv.format import attention_parts
from baton.model.attention import KvCache
from baton.model.checkpoint import resolve
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder, stages_of
from baton.model.fingerprint import model_fingerprint, weights_digest
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.model.tensors import dtype_name
from baton.model.weights import load_weights
from baton.model.zeros import SharedMemory
from baton.native import build as native_build
from baton.native.collective import Channel, Collective
from baton.native.decoder import NativeDecoder
from baton.native.library import isa
from baton.native.packed import LoadedWeight, PackedWeights, weights_of
from baton.native.shared import share_weights
from baton.process.load_progress import LoadProgress

_PACKING = (Path(__file__).parents[1] / "model", Path(native_build.__file__).parent)
"""Folders of the code that reads, merges and computes tensors, and of the code that packs them."""


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank in a worker of several, and its exchanges to the others.

    `rank` counts all ranks, stage by stage. `tp_rank` is its number among the ranks of its stage, `pp_rank` that of the
    stage, of `pp_size`. `collective` is shared by the ranks of its stage. `receive` and `send` are channels from the
    stage before and to the next one.
    """

    rank: int
    tp_rank: int
    pp_rank: int
    pp_size: int
    collective: Collective | None
    receive: Channel | None
    send: Channel | None

    @property
    def exchanges(self) -> list[Collective | Channel]:
        """The exchanges that are there."""
        return [exchange for exchange in (self.collective, self.receive, self.send) if exchange is not None]


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with its properties; `fingerprint` is in hex (`baton.model.fingerprint`).

    `layers` has the layers of the decoder, all or those of a pipeline's stage.
    """

    path: Path
    config: ModelConfig
    decoder: Decoder | NativeDecoder | StageDecoder
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel
    layers: range

    def new_kv_cache(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype | None = None,
        host_pages: int = 0,
        shared: SharedMemory | None = None,
    ) -> KvCache:
        """Zeroed pages for this rank's layers and heads; `dtype` defaults to the compute dtype.

        They are in `shared`, if it is given.
        """
        heads = len(self.parallel.kv_heads(self.config.num_kv_heads))
        parts = attention_parts(dtype_name(dtype or self.dtype), heads, self.config.head_dim)
        return KvCache.allocate(
            parts,
            num_layers=len(self.layers),
            num_pages=num_pages,
            host_pages=host_pages,
            page_size=page_size,
            device=self.device,
            shared=shared,
        )


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    parallel: TensorParallel | None = None,
    native: CDLL | None = None,
    packed_weights: str = "",
    progress: LoadProgress | None = None,
    place: RankPlace | None = None,
) -> LoadedModel:
    """Load a checkpoint directory or hub name, to compute in `dtype` on `device`.

    `native` is a library of kernels for models for which `baton.native.decoder.unsupported` returns nothing.
    `packed_weights` is a file of their weights for all workers of this host (`baton.native.shared`), or "". `progress`
    is that of the load. With `place`, only the shard of this rank is loaded. Raises ModelError for the checkpoint,
    ConfigError for that file.
    """
    progress = progress or LoadProgress()
    path = resolve(name)
    config = ModelConfig.from_pretrained(path)
    stage, collective = range(config.num_layers), None
    if place is not None:
        stage, collective = stages_of(config.num_layers, place.pp_size)[place.pp_rank], place.collective
    if collective is not None:
        parallel = collective.tensor_parallel
    parallel = parallel or TensorParallel()
    options = TensorOptions(dtype, torch.device(device), repacked=native is not None)
    fingerprint = model_fingerprint(config, weights_digest(path, progress), dtype_name(dtype))
    loading = partial(_load, config, options, parallel, stage, path, progress)
    decoder: Decoder | NativeDecoder | StageDecoder
    if native is None:
        decoder = loading()
        if place is not None and place.pp_size > 1:
            decoder = StageDecoder(decoder, place.receive, place.send)
    else:
        weights = _pack(loading, native, packed_weights, fingerprint, parallel, stage, progress)
        decoder = NativeDecoder(config, dtype, weights, native, torch.get_num_threads(), collective, stage)
        if place is not None and place.pp_size > 1:
            decoder = NativeStageDecoder(decoder, place.receive, place.send)
    return LoadedModel(
        path=path,
        config=config,
        decoder=decoder,
        fingerprint=fingerprint,
        dtype=dtype,
        device=options.device,
        parallel=parallel,
        layers=stage,
    )


def _load(
    config: ModelConfig,
    options: TensorOptions,
    parallel: TensorParallel,
    stage: range,
    path: Path,
    progress: LoadProgress,
) -> Decoder:
    decoder = Decoder(config, options, parallel, stage).eval()
    load_weights(decoder, path, progress)
    return decoder


def _pack(
    loading: Callable[[], Decoder],
    library: CDLL,
    shared: str,
    fingerprint: str,
    parallel: TensorParallel,
    stage: range,
    progress: LoadProgress,
) -> PackedWeights:
    threads = torch.get_num_threads()

    def load() -> list[LoadedWeight]:
        return weights_of(loading(), library, progress)

    rank = f"{parallel.rank} of {parallel.size}, layers {stage.start} to {stage.stop}"
    if not shared:
        return PackedWeights.private(load(), threads)
    key = {
        "boot": _boot_id(),
        "model": fingerprint,
        "layout": f"{packing_hash()}-{library.baton_native_source_hash().decode()}",
        "instructions": isa(library),
        "rank": rank,
    }
    return share_weights(shared, key, load, threads, progress)


def packing_hash(folders: Iterable[Path] = _PACKING) -> str:
    """Hash, in hex, of all Python code that determines the contents of packed weights."""
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return native_build.hash_of([Path(__file__), *files])


def _boot_id() -> str:
    """Id of this boot of the machine: data of an earlier boot may not have been written to the file."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
