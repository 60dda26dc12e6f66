"""A checkpoint of Qwen2.5-0.5B's shape with random weights: for measurements that need no download.

494 M parameters in bfloat16 (about 1 GB), the same for the same seed, and a small byte-level BPE tokenizer trained on
Python's own source files. The weights have the scale of a fresh initialisation: speed depends on shapes, not values,
and prompts are best given as token ids.

    python -m bench.checkpoint DIR [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 24, 896, 4864, 14, 2, 64, 151936
EOS = "<|endoftext|>"
WEIGHT_STD = 0.02
TOKENIZER_WORDS = 4000
_DONE = "complete"

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "max_window_layers": LAYERS,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "initializer_range": WEIGHT_STD,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order in which they are drawn."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, width in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            yield f"{at}.self_attn.{name}_proj.weight", (width, HIDDEN)
            yield f"{at}.self_attn.{name}_proj.bias", (width,)
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{at}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """All weights in bfloat16."""
    chosen = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes():
        if "norm" in name:
            found[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            found[name] = torch.empty(shape).normal_(0.0, WEIGHT_STD, generator=chosen).bfloat16()
    return found


def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer whose first token ends a sequence."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_WORDS, initial_alphabet=alphabet, special_tokens=[EOS], show_progress=False
    )
    made.train([str(path) for path in sources], trainer)
    return made


def write(directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint into `directory` unless it is there, and return it."""
    done = directory / _DONE
    if done.exists() and done.read_text() == str(seed):
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    if shutil.disk_usage(directory).free < 2 << 30:
        raise SystemExit(f"{directory}: less than 2 GiB are free there")
    save_file(tensors(seed), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": 32768,
    }
    generation = {"bos_token_id": 0, "eos_token_id": 0}
    documents = {"config": CONFIG, "tokenizer_config": about, "generation_config": generation}
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    done.write_text(str(seed))
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write(arguments.directory, arguments.seed))


if __name__ == "__main__":
    main()
