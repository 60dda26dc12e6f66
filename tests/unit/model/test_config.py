"""Reading config.json in all its spellings, and refusing what can't be computed, by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ModelError
from baton.model.config import ModelConfig, default_sampling
from baton.model.rope import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
WANTED_ROPE = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)


def read(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, "architectures": [architecture], **fields})


def test_omitted_config_fields_get_transformers_defaults() -> None:
    config = read()
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rope == RopeConfig(10_000.0)
    assert config.windows == (None,) * 4
    assert config.rms_norm_eps == 1e-6
    assert config.eos_token_ids == ()
    assert config.bos_token_id is None
    assert config.dtype is None
    assert not config.tie_word_embeddings


def test_null_counts_as_left_out() -> None:
    assert read(num_key_value_heads=None, head_dim=None, rope_scaling=None, tie_word_embeddings=None) == read()


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
        {"rope_parameters": {"full_attention": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}}},
        {
            "original_max_position_embeddings": 64,
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "original_max_position_embeddings": 9},
        },
        {
            "max_position_embeddings": 64,
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "original_max_position_embeddings": None},
        },
    ],
)
def test_rope_spellings(spelling: dict[str, Any]) -> None:
    assert read(**spelling).rope == WANTED_ROPE


@pytest.mark.parametrize(
    ("spelling", "rope"),
    [
        ({"rope_theta": 1e6}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_theta": 1e6}}, RopeConfig(1e6)),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}}, RopeConfig(1e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(1e4, "linear", 2.0)),
    ],
)
def test_simple_rope_settings_are_read_in_all_spellings(spelling: dict[str, Any], rope: RopeConfig) -> None:
    assert read(**spelling).rope == rope


@pytest.mark.parametrize("spelling", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}])
def test_dtypes_are_read_in_all_spellings(spelling: dict[str, str]) -> None:
    assert read(**spelling).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 0}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8,) * 4),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 8, None, 8),
        ),
        ("Qwen3ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_windows_of_layers(architecture: str, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(architecture, **fields).windows == windows


def test_families_differ_in_biases_and_norms() -> None:
    assert not read().qkv_bias
    biased = read(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias
    assert biased.o_bias
    assert biased.mlp_bias
    qwen2 = read("Qwen2ForCausalLM", attention_bias=False)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read("Qwen3ForCausalLM")
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert not read("MistralForCausalLM", attention_bias=True).qkv_bias


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 7, "bos_token_id": 0}))
    config = ModelConfig.from_pretrained(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((7,), 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (8, 9)


def test_model_type_stands_in_for_a_missing_architecture() -> None:
    config = ModelConfig.from_dict({**LLAMA, "architectures": None, "model_type": "qwen3"})
    assert config.architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel; supported: Llama"),
        ({"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2'; supported: LlamaForCausalLM"),
        ({"vocab_size": None}, "config.json lacks vocab_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive number, not '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive number, not 0"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers must be an integer, not 1.5"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, not nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim must be even for rotary embeddings, not 15"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic', which no cached KV can follow; supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'; supported: default, linear, yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1}}, "beta_fast 1.0 must exceed beta_slow 1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate must be true or false, not 1"),
        ({"rope_scaling": {"type": "linear"}}, "config.json lacks rope_parameters.factor"),
        ({"rope_scaling": "linear"}, "rope_parameters must be an object, not 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3_ROPE, "high_freq_factor": 1.0}},
            "high_freq_factor 1.0 must exceed low_freq_factor 1.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"factor": 1}, "sliding_attention": {"factor": 2}}},
            "rope_parameters that differ between layer types",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, not '</s>'"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types must list 4 layers"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 4}, "'linear_attention'"),
        (
            QWEN2 | {"layer_types": ["sliding_attention"] * 4},
            "names sliding_attention, but no sliding_window is in use",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 4},
            "'full_attention' for MistralForCausalLM",
        ),
        (QWEN2 | {"max_window_layers": -1}, "max_window_layers must be a positive"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window must be a positive number, not 0",
        ),
    ],
)  # fmt: skip
def test_refusals_name_field_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message.replace("(", r"\(")):
        ModelConfig.from_dict({**LLAMA, **fields})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*config.json: No such file"),
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, not list"),
    ],
)
def test_unreadable_config_names_the_file(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("document", "found"),
    [
        (
            '{"do_sample": true, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05, "min_p": null}',
            {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05},
        ),
        ('{"top_k": -1, "max_new_tokens": 9, "temperature": 1}', {"top_k": 0, "max_tokens": 9, "temperature": 1}),
        (None, {}),
    ],
)
def test_sampling_defaults_of_a_checkpoint(tmp_path: Path, document: str | None, found: dict[str, Any]) -> None:
    if document is not None:
        (tmp_path / "generation_config.json").write_text(document)
    assert default_sampling(tmp_path) == found


@pytest.mark.parametrize(
    ("document", "words"),
    [('{"top_p": 3}', "top_p: .*got 3"), ('{"top_k": "many"}', "top_k: must be a number, got 'many'")],
)
def test_a_bad_sampling_default_is_named(tmp_path: Path, document: str, words: str) -> None:
    (tmp_path / "generation_config.json").write_text(document)
    with pytest.raises(ModelError, match=f"^generation_config.json: {words}.*--generation-config none"):
        default_sampling(tmp_path)
