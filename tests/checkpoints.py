"""Tiny random checkpoints of every supported family, made with transformers.

Each differs from the others where implementations go wrong: a head_dim that is not hidden_size / heads, GQA
ratios of 1, 2 and 4, windows shorter than the contexts, Llama-3 RoPE scaling with an original length that
contexts pass, biases and norm weights that are not at their initial values.

A freshly initialised model repeats one token and decides between near-equal logits, so equality with it would
prove little. Weights are therefore scaled so that greedy output varies and decisions are clear.
`assert_lively` checks both, and `lively_prompt` finds a prompt that passes.

The tokenizer is byte-level without merges: ids 0 to 255 are the bytes in GPT-2's order, then come the special
tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

BOS_ID, EOS_ID, START_ID, END_ID = 256, 257, 258, 259
VOCAB_SIZE = 264
MIN_DISTINCT = 16
MIN_MARGIN = 2e-3
"""Twenty times the tolerance on logits."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "dtype": "float32",
}

_OWN: dict[str, dict[str, Any]] = {
    "llama": {
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {
        "num_key_value_heads": 1,
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "qwen2": {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
        },
    },
}

_MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def make_checkpoint(
    family: str, directory: Path, *, tied: bool = False, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Write model, tokenizer and chat template of `family` into `directory`, and return it.

    `overrides` go to the transformers config. The same arguments give the same weights.
    """
    config_class, model_class = _MODELS[family]
    config = config_class(**{**_COMMON, **_OWN[family], "tie_word_embeddings": tied, **overrides})
    model = model_class(config).eval()
    _enliven(model, seed)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    _tokenizer(config.vocab_size).save_pretrained(directory)
    return directory


def _enliven(model: torch.nn.Module, seed: int) -> None:
    """Random weights of a scale at which greedy output varies.

    Block outputs outweigh the embedding in the residual stream, or tied models would repeat their input.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data = 1 + 0.1 * noise
        elif name.endswith("bias") or "embed_tokens" in name or "lm_head" in name:
            parameter.data = 0.5 * noise
        else:
            gain = 4.0 if "o_proj" in name or "down_proj" in name else 1.5
            parameter.data = gain * parameter.shape[1] ** -0.5 * noise


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"]
    specials += [f"<|extra_{index}|>" for index in range(vocab_size - len(alphabet) - len(specials))]
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", chat_template=CHAT_TEMPLATE
    )


@dataclass(frozen=True)
class Reference:
    """Tokens that transformers generates greedily, end-of-sequence ignored."""

    token_ids: list[int]
    margins: list[float]
    """Top logit less the second, at each step."""


def load_reference(directory: Path) -> Any:
    """The checkpoint as a transformers model in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def greedy(model: Any, prompt: list[int], count: int = 64) -> Reference:
    """`count` tokens from `generate`, with no end-of-sequence token."""
    output = model.generate(
        torch.tensor([prompt]),
        generation_config=transformers.GenerationConfig(
            do_sample=False, max_new_tokens=count, output_logits=True, return_dict_in_generate=True, pad_token_id=EOS_ID
        ),
    )
    top = torch.cat(output.logits).topk(2, dim=-1).values
    return Reference(output.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist())


def assert_lively(reference: Reference, count: int = 64) -> None:
    """Fail unless there are `count` tokens, at least MIN_DISTINCT different ones, and no near-tie."""
    distinct = len(set(reference.token_ids))
    assert len(reference.token_ids) == count, f"{len(reference.token_ids)} tokens instead of {count}"
    assert distinct >= MIN_DISTINCT, f"only {distinct} distinct tokens in {count}"
    assert min(reference.margins) >= MIN_MARGIN, f"a top-1 margin of {min(reference.margins)}"


def lively_prompt(model: Any, length: int, count: int = 64) -> tuple[list[int], Reference]:
    """The first of 16 fixed random prompts whose greedy continuation passes `assert_lively`, with it."""
    failures = []
    for seed in range(16):
        prompt = prompt_ids(length, seed)
        reference = greedy(model, prompt, count)
        try:
            assert_lively(reference, count)
        except AssertionError as failure:
            failures.append(str(failure))
        else:
            return prompt, reference
    raise AssertionError("no lively prompt: " + "; ".join(failures))


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """Random byte tokens, no special ones."""
    ids: list[int] = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids
