"""A checkpoint whose arithmetic takes no time: the layers and operators of another one, with tensors of no size.

What a step of it takes is what a step takes beside arithmetic and memory.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.layers import Parallel
from baton.model.linear import Placement

WIDTH, VOCABULARY = 8, 1024
_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": WIDTH,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write(model: Path, directory: Path) -> Path:
    """Write to `directory` what `model` is but for its sizes: hidden size 8, one head, 1,024 ids, random weights."""
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(raw | _SIZES), encoding="utf-8")
    config = ModelConfig.from_pretrained(directory)
    decoder = Decoder(config, Placement(torch.float32, torch.device("cpu")), Parallel())
    draw = torch.Generator().manual_seed(0)
    slots = [*decoder.checkpoint_tensors(), *(() if config.tie_word_embeddings else (decoder.head_tensor(),))]
    tensors = {slot.name: torch.randn(slot.shape, generator=draw).bfloat16() for slot in slots}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
