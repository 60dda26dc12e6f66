"""`load_model`: from a checkpoint directory to a model that can compute."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.kv.format import attention_parts
from baton.model.attention import KvCache
from baton.model.checkpoint import resolve
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.dtypes import dtype_name
from baton.model.fingerprint import model_fingerprint, weights_digest
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.model.weights import load_weights
from baton.native.decoder import NativeDecoder


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready to run, and what others need to know of it.

    `fingerprint` is the model fingerprint in hex (see baton.model.fingerprint).
    """

    path: Path
    config: ModelConfig
    decoder: Decoder | NativeDecoder
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel

    def new_kv_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> KvCache:
        """Zeroed pages for this rank's layers and heads; `dtype` defaults to the compute dtype."""
        heads = self.parallel.share("num_key_value_heads", self.config.num_kv_heads)
        parts = attention_parts(dtype_name(dtype or self.dtype), heads, self.config.head_dim)
        layers = self.config.num_layers
        return KvCache.allocate(parts, num_layers=layers, num_pages=num_pages, page_size=page_size, device=self.device)


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    parallel: TensorParallel | None = None,
    native: CDLL | None = None,
) -> LoadedModel:
    """Load a checkpoint directory or hub name, computing in `dtype` on `device`.

    `native`: the library whose kernels compute; `baton.native.decoder.unsupported` tells for which models.

    Raises ModelError naming what is wrong with the checkpoint.
    """
    path = resolve(name)
    config = ModelConfig.from_pretrained(path)
    parallel = parallel or TensorParallel()
    options = TensorOptions(dtype, torch.device(device), repacked=native is not None)
    decoder = _load(config, options, parallel, path, native)
    return LoadedModel(
        path=path,
        config=config,
        decoder=decoder,
        fingerprint=model_fingerprint(config, weights_digest(path), dtype_name(dtype)),
        dtype=dtype,
        device=options.device,
        parallel=parallel,
    )


def _load(
    config: ModelConfig, options: TensorOptions, parallel: TensorParallel, path: Path, native: CDLL | None
) -> Decoder | NativeDecoder:
    decoder = Decoder(config, options, parallel).eval()
    load_weights(decoder, path)
    if native is not None:
        return NativeDecoder(decoder, native, torch.get_num_threads())
    return decoder
