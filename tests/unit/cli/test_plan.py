"""`baton plan`: arithmetic from a config.json or a name."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from baton.cli.main import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def memory(*arguments: str) -> dict[str, dict[str, Any]]:
    """Values of the figures by group and name."""
    done = CliRunner().invoke(main, ["plan", "memory", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return {group: {each["name"]: each["value"] for each in own} for group, own in json.loads(done.output).items()}


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["plan", "memory", *arguments])
    assert done.exit_code == 2
    return done.output


@pytest.mark.parametrize("form", ["folder", "file", "name"])
def test_a_model_is_a_folder_a_config_or_a_name(form: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    model = {"folder": str(tmp_path), "file": str(tmp_path / "config.json"), "name": "llama-3.1-8b"}[form]
    found = memory(model)
    assert found["model"]["parameters"] == 8_030_261_248
    assert found["engine"]["KV of a token"] == 131_072
    assert found["engine"]["gate and up of a token"] == 57_344


def test_sequences_fit_until_their_pages_are_more_than_the_room() -> None:
    sizes = ("llama-3.1-8b", "--memory=80GiB", "--context=32768")
    found = memory(*sizes, "--batch=16")
    left = found["memory of 80GiB"]
    assert (left["sequences of 32,768 tokens"], left["fits"]) == (16, "yes")
    engine = found["engine"]
    parts = ("weights", "workspace", "spare page", "KV of 16 * 32,768 tokens")
    assert engine["memory needed"] == sum(engine[name] for name in parts)
    assert left["left for KV"] == (80 << 30) - sum(engine[name] for name in parts[:3])
    assert memory(*sizes, "--batch=17")["memory of 80GiB"]["fits"] == "no"
    assert memory("llama-3-70b", "--memory=80GiB")["memory of 80GiB"] == {"fits": "no"}


def test_ranks_have_shares() -> None:
    found = memory("llama-3-70b", "--tensor-parallel=4")["engine: the largest of 4 ranks"]
    # Matrices and embeddings are 35.276 GB; norms are whole, and in float32.
    assert found["weights"] == 35_276_193_792 + 4 * 161 * 8192 + 64 * 8
    assert found["KV of a token"] == 81_920
    stages = memory("llama-3-70b", "--tensor-parallel=4", "--pipeline-parallel=2")
    assert stages["engine: the largest of 8 ranks"]["KV of a token"] == 40_960


def test_figures_of_stages_are_those_of_one_rank() -> None:
    sizes = ("--pipeline-parallel=3", "--batch=2500", "--context=64", "--memory=80GiB")
    found = memory("llama-3.1-8b", *sizes)["engine: the largest of 3 ranks"]
    kv = found["KV of 2500 * 64 tokens"]
    # 10 layers with the output projection need less than 11 without.
    assert (found["KV of a token"], kv) == (11 * 4096, 2500 * 256 * 11 * 4096)
    assert found["memory needed"] == found["weights"] + found["workspace"] + found["spare page"] + kv


def test_ranks_share_the_workspace_and_what_is_streamed() -> None:
    whole, half = (memory("llama-3.1-8b", "--device=cpu", *more) for more in ((), ("--tensor-parallel=2",)))
    assert half["engine: the largest of 2 ranks"]["workspace"] < whole["engine"]["workspace"]
    streamed = memory("llama-3.1-8b", "--kv-home=host", "--context=1048576", "--tensor-parallel=2", "--chunk-size=4096")
    assert streamed["other ways to stream a prompt"] == {
        "with one layer's KV whole": 2 << 30,
        "and new KV joined by cat": 4 << 30,
        "copies to the device, any way": 8160 << 30,
    }


def test_no_pass_has_more_tokens_than_a_sequence() -> None:
    short, long = (memory("llama-3.1-8b", f"--context={tokens}")["engine"]["workspace"] for tokens in (100, 2048))
    assert short < long / 10


def test_kv_in_host_memory_leaves_the_ring_on_the_device() -> None:
    found = memory("llama-3.1-8b", "--kv-home=host", "--host-memory=128GiB", "--context=1048576", "--chunk-size=4096")
    assert found["engine"]["ring"] == 192 << 20
    assert found["host memory of 128GiB"]["tokens"] == 1 << 20
    assert found["other ways to stream a prompt"] == {
        "with one layer's KV whole": 4 << 30,
        "and new KV joined by cat": 8 << 30,
        "copies to the device, any way": 16320 << 30,
    }


def test_a_cpu_has_packed_weights_and_a_runtime() -> None:
    found = memory("qwen1.5-0.5b", "--device=cpu", "--weight-bits=32", "--kv-bits=32")["engine"]
    # All sizes are whole panels; 64 / 2 rotary frequencies.
    assert found["weights"] == 4 * (463_937_536 + 151_936 * 1024 + 49 * 1024) + 8 * 32
    assert found["runtime"] == 250 << 20


@pytest.mark.parametrize(
    ("given", "shown"), [("80GB", "80GB"), ("h200", "141GiB"), ("1.5TiB", "1536GiB"), ("80000000001B", "80.000 GB")]
)
def test_a_memory_is_shown_with_a_unit_that_people_use(given: str, shown: str) -> None:
    assert f"memory of {shown}" in memory("qwen3-0.6b", f"--memory={given}")


def test_hosts_hold_the_copies_of_all_ranks() -> None:
    sizes = ("llama-3.1-8b", "--kv-home=host", "--host-memory=128GiB", "--context=1048576")
    for tp, tokens in ((8, 1 << 20), (16, 1 << 19)):
        assert memory(*sizes, f"--tensor-parallel={tp}")["host memory of 128GiB"]["tokens"] == tokens


MIXTRAL = CONFIG | {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize(("config", "published"), [(MIXTRAL, 46_702_792_704), (QWEN, 30_532_122_624)])
def test_mixtures_have_the_published_number_of_parameters(
    config: dict[str, Any], published: int, tmp_path: Path
) -> None:
    """Mixtral 8x7B and Qwen3-30B-A3B; all tensors of the checkpoint, of which the planner leaves out the routers."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    experts = config.get("num_experts") or config["num_local_experts"]
    routers = config["num_hidden_layers"] * config["hidden_size"] * experts
    assert memory(str(tmp_path))["model"]["parameters"] + routers == published


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, "supported in plans: LlamaForCausalLM, "),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}}, "as --weight-bits"),
        ({"num_experts": None}, "num_experts must be a positive integer, not None"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 exceeds num_experts 128"),
        ({"mlp_only_layers": [0]}, "only mixtures in all layers are supported"),
    ],
)
def test_models_that_can_not_be_planned_are_refused_with_what_can(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | change), encoding="utf-8")
    assert words in refused(str(tmp_path))


def test_formulas_have_their_numbers_put_in() -> None:
    done = CliRunner().invoke(main, ["plan", "memory", "llama-3.1-8b", "--explain"])
    assert (
        "KV of a token: 131,072 B\n    = 2 * 32 layers * 8 KV heads * head dim 128 * 16 / 8\n    source: "
        in done.output
    )
    table = CliRunner().invoke(main, ["plan", "memory", "llama-3.1-8b"]).output
    assert "16,061,055,488 B  16.061 GB, 14.958 GiB" in table


def test_bad_values_are_named(tmp_path: Path) -> None:
    assert "'MODEL': 'gpt-9' is no folder, no config.json, and none of llama-2-7b, " in refused("gpt-9")
    assert "'MODEL': cannot read " in refused(str(tmp_path))
    assert "'--memory': must be a size such as 512MiB or 4GB, got 'much'" in refused("qwen3-8b", "--memory=much")
    assert "'--memory': '80' has no unit, such as in 80GB" in refused("qwen3-8b", "--memory=80")
    assert "'--memory': must be 1MiB or more, got '80B'" in refused("qwen3-8b", "--memory=80B")
    assert "'--tensor-parallel': 3 ranks do not divide 32 heads" in refused("qwen3-8b", "--tensor-parallel=3")
    assert "'--pipeline-parallel': 40 stages for 36 layers" in refused("qwen3-8b", "--pipeline-parallel=40")
    assert "'--host-memory': is for --device cuda with --kv-home host" in refused("qwen3-8b", "--host-memory=1GiB")
