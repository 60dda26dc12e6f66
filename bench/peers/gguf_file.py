"""A checkpoint in the GGUF format, for llama.cpp: CHECKPOINT OUT. Runs in llama.cpp's environment (gguf, numpy).

Qwen2's shape, bfloat16, without a vocabulary: prompts are token ids. Matrices are taken over as they are; vectors
become float32, as llama.cpp wants them.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tensors(path: Path) -> Iterator[tuple[str, list[int], Any]]:
    """Name, shape and bfloat16 bits (uint16, flat) of each tensor of a safetensors file."""
    raw = np.memmap(path, np.uint8, "r")
    (size,) = struct.unpack("<Q", raw[:8].tobytes())
    for name, about in json.loads(raw[8 : 8 + size].tobytes()).items():
        if name == "__metadata__":
            continue
        if about["dtype"] != "BF16":
            raise SystemExit(f"{name}: must be BF16, is {about['dtype']}")
        begin, end = (8 + size + offset for offset in about["data_offsets"])
        yield name, about["shape"], np.frombuffer(raw[begin:end], np.uint16)


def gguf_name(name: str) -> str:
    """GGUF's name of a checkpoint's tensor."""
    if name in OTHER_TENSORS:
        return OTHER_TENSORS[name]
    _, _, layer, inner = name.split(".", 3)
    module, _, leaf = inner.rpartition(".")
    return f"blk.{layer}.{LAYER_TENSORS[module]}.{leaf}"


def convert(checkpoint: Path, out: Path) -> None:
    """Write `out`."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, shape, bits in tensors(checkpoint / "model.safetensors"):
        if len(shape) == 1:
            # A bfloat16 is the upper half of a float32.
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name(name), bits.view(np.uint8).reshape(shape[0], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
