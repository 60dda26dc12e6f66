"""A checkpoint with random weights: for measurements that need no download.

Its shape is that of Qwen2.5-0.5B (494 M parameters, 1 GB) or of SmolLM-135M (135 M, 0.3 GB), in bfloat16. The weights
are the same for the same seed, and have the scale of a fresh initialisation: speed depends on shapes, not values. A
small byte-level BPE tokenizer is trained on Python's own source files; prompts are best given as token ids.

    python -m bench.checkpoint DIR [--shape qwen2.5-0.5b] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

EOS = "<|endoftext|>"
WEIGHT_STD = 0.02
TOKENIZER_WORDS = 4000
_DONE = "complete"
_COMMON = {
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "initializer_range": WEIGHT_STD,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
QWEN_0_5B: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "use_sliding_window": False,
}
SMOLLM_135M: dict[str, Any] = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
}
SHAPES = {"qwen2.5-0.5b": QWEN_0_5B, "smollm-135m": SMOLLM_135M}


def tensors(config: dict[str, Any], seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """All weights of a model with the given config.json, in bfloat16, drawn on a device."""
    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))  # type: ignore[no-untyped-call]
    chosen, found = torch.Generator(device).manual_seed(seed), dict[str, torch.Tensor]()
    for name, like in model.named_parameters():
        if "norm" in name:
            found[name] = torch.ones(like.shape, dtype=torch.bfloat16)
        else:
            drawn = torch.empty(like.shape, device=device).normal_(0.0, WEIGHT_STD, generator=chosen)
            found[name] = drawn.bfloat16().cpu()
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


def write(directory: Path, config: dict[str, Any] = QWEN_0_5B, seed: int = 0, device: str = "cpu") -> Path:
    """Write the checkpoint into `directory` unless it is there, and return it."""
    done, made = directory / _DONE, json.dumps([config, seed])
    if done.exists() and done.read_text() == made:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    weights = tensors(config, seed, device)
    needed = 2 * sum(each.numel() for each in weights.values())
    if shutil.disk_usage(directory).free < 2 * needed:
        raise SystemExit(f"{directory}: less than {2 * needed / 2**30:.1f} GiB are free there")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": config["max_position_embeddings"],
    }
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    documents = {"config": config, "tokenizer_config": about, "generation_config": generation}
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    done.write_text(made)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(write(given.directory, SHAPES[given.shape], given.seed))


if __name__ == "__main__":
    main()
