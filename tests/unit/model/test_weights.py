"""Loading weights: single and sharded, tied and untied, and every way in which a checkpoint can be bad."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.load import load_model
from baton.errors import ModelError
from baton.model.checkpoint import INDEX_NAME, SINGLE_NAME, resolve
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.layers import TensorParallel
from baton.model.linear import DenseStorage, TensorOptions
from tests.checkpoints import load_reference, make_checkpoint, prompt_ids
from tests.unit.model.runner import Sequence, chunked_logits, forward

Tensors = dict[str, Tensor]


def logits(directory: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return chunked_logits(load_model(directory, dtype=dtype), prompt_ids(20), 20, 16)


def edit(directory: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(directory / SINGLE_NAME)
    change(tensors)
    save_file(tensors, directory / SINGLE_NAME, metadata={"format": "pt"})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "whole")


@pytest.mark.parametrize("repacked", [False, True])
def test_repacked_weights_are_read_from_the_file_and_not_copied_before(repacked: bool) -> None:
    given, options = torch.randn(8, 16), TensorOptions(torch.float32, torch.device("cpu"), repacked)
    for tensor in (given, given.to(torch.bfloat16), torch.randn(16, 8).T, given[:4]):
        storage = DenseStorage(8, 16, True, options)
        storage.load("weight", 4, tensor[:4])
        if repacked:
            assert storage.weight.is_meta
            assert [(row, view.data_ptr()) for row, view in storage.views] == [(4, tensor.data_ptr())]
        else:
            assert torch.equal(storage.weight[4:], tensor[:4].to(torch.float32))
            assert not storage.views


def test_sharded_equals_single(checkpoint: Path, tmp_path: Path) -> None:
    sharded = make_checkpoint("llama", tmp_path / "sharded", max_shard_size="100KB")
    assert (sharded / INDEX_NAME).is_file()
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(sharded), logits(checkpoint))


def test_tied_checkpoint_has_no_projection(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, tied=True)
    assert "lm_head.weight" not in load_file(tmp_path / SINGLE_NAME)
    decoder = load_model(tmp_path, dtype=torch.float32).decoder
    hidden = torch.randn(2, 64)
    expected = decoder.norm(hidden) @ decoder.embedding.weight.T
    torch.testing.assert_close(decoder.logits(hidden), expected, rtol=0, atol=1e-4)


def test_an_output_projection_takes_memory_only_when_loaded(checkpoint: Path) -> None:
    config = ModelConfig.from_pretrained(checkpoint)
    decoder = Decoder(config, TensorOptions(torch.float32, torch.device("cpu")), TensorParallel())
    assert decoder.head.storage.weight.is_meta
    assert not any(parameter.is_meta for parameter in load_model(checkpoint, dtype=torch.float32).decoder.parameters())


def test_tied_checkpoint_may_repeat_the_embedding(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, tied=True)
    expected = logits(tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(tmp_path), expected)


def test_a_projection_that_differs_counts_though_tied(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, tied=True)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0).contiguous()}))
    with torch.inference_mode():
        expected = load_reference(tmp_path)(torch.tensor([prompt_ids(20)])).logits[0]
    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-4)


def test_weights_are_cast_at_load(checkpoint: Path) -> None:
    model = load_model(checkpoint, dtype=torch.bfloat16)
    kinds = {name.rsplit(".", 2)[-2]: parameter.dtype for name, parameter in model.decoder.named_parameters()}
    norms = {kind: kinds.pop(kind) for kind in list(kinds) if kind.endswith("norm")}
    assert set(norms.values()) == {torch.float32}, "norms are float32 whatever the model is"
    assert kinds["embedding"] == torch.bfloat16
    assert set(kinds.values()) == {torch.bfloat16}
    kv = model.new_kv_cache(1, 16)
    assert forward(model, kv, [(Sequence(kv, 1), [1])]).dtype == torch.bfloat16
    assert model.new_kv_cache(2, 16).dtype == torch.bfloat16
    assert model.new_kv_cache(2, 16, torch.float32).dtype == torch.float32


def test_old_rotary_buffers_are_ignored(checkpoint: Path) -> None:
    expected = logits(checkpoint)
    edit(checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}))
    assert torch.equal(logits(checkpoint), expected)


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("model.layers.1.mlp.up_proj.weight"), r"lacks tensor model.layers.1.mlp.up_proj.weight"),
        (drop("lm_head.weight"), r"lacks tensor lm_head.weight of shape \[264, 64\]"),
        (
            put("model.layers.2.self_attn.k_proj.weight", torch.zeros(96, 64)),
            r"k_proj.weight in model.safetensors: expected shape \[48, 64\], found \[96, 64\]",
        ),
        (put("model.norm.weight", torch.zeros(1, 64)), r"expected shape \[64\], found \[1, 64\]"),
        (
            put("model.layers.0.self_attn.q_proj.bias", torch.zeros(96)),
            "1 tensors unknown to LlamaForCausalLM: model.layers.0.self_attn.q_proj.bias",
        ),
        (put("model.layers.3.input_layernorm.weight", torch.zeros(64)), "LlamaForCausalLM: model.layers.3"),
        (
            put("model.norm.weight", torch.zeros(64, dtype=torch.int8)),
            "model.norm.weight in model.safetensors: unsupported dtype torch.int8",
        ),
        (
            put("model.norm.weight", torch.zeros(64).to(torch.float8_e4m3fn)),
            "unsupported dtype torch.float8_e4m3fn",
        ),
    ],
)  # fmt: skip
def test_bad_tensors_are_named(checkpoint: Path, change: Callable[[Tensors], None], message: str) -> None:
    edit(checkpoint, change)
    with pytest.raises(ModelError, match=message):
        load_model(checkpoint, dtype=torch.float32)


@pytest.mark.parametrize("kept", [0, 4, 100, 20_000, -1])
def test_truncated_file_is_named(checkpoint: Path, kept: int) -> None:
    file = checkpoint / SINGLE_NAME
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model.safetensors is truncated or not a safetensors file"):
        load_model(checkpoint, dtype=torch.float32)


def test_missing_files_are_named(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / SINGLE_NAME).unlink()
    with pytest.raises(ModelError, match=f"holds neither {SINGLE_NAME} nor {INDEX_NAME}"):
        load_model(checkpoint, dtype=torch.float32)
    sharded = make_checkpoint("llama", tmp_path / "sharded", max_shard_size="100KB")
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"names {lost.name}, which does not exist"):
        load_model(sharded, dtype=torch.float32)


@pytest.mark.parametrize("index", ["", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_malformed_index_is_named(checkpoint: Path, index: str) -> None:
    (checkpoint / SINGLE_NAME).unlink()
    (checkpoint / INDEX_NAME).write_text(index)
    with pytest.raises(ModelError, match=f"cannot read .*{INDEX_NAME}"):
        load_model(checkpoint, dtype=torch.float32)


def test_an_index_can_not_lead_out_of_the_directory(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / SINGLE_NAME).rename(tmp_path / "outside.safetensors")
    (checkpoint / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(ModelError, match=r"names outside.safetensors, which does not exist"):
        load_model(checkpoint, dtype=torch.float32)


def test_an_unreachable_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("nobody/no-such-model", "/no/such/folder", ""):
        with pytest.raises(ModelError, match=f"'{name}' is not a directory"):
            resolve(name)


MEASURE = """
import sys, torch
from pathlib import Path
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.process.load_progress import LoadProgress
from baton.model.weights import load_weights

def status(field):
    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith(field)) * 1024

def load(path):
    options = TensorOptions(torch.float32, torch.device('cpu'))
    decoder = Decoder(ModelConfig.from_pretrained(path), options, TensorParallel())
    weights = sum(parameter.nbytes for parameter in decoder.parameters())
    layer = sum(parameter.nbytes for parameter in decoder.layers[0].parameters())
    load_weights(decoder, path, LoadProgress())
    return decoder, weights, layer

warm = load(Path(sys.argv[1]))
before = status('VmRSS')
decoder, weights, layer = load(Path(sys.argv[2]))
print(status('VmHWM') - before, weights, layer)
"""


def test_peak_memory_is_the_weights_and_one_layer(checkpoint: Path, tmp_path: Path) -> None:
    """The high-water mark of resident memory, mapped files included, in a process of its own."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "head_dim": 128}
    large = make_checkpoint("llama", tmp_path / "large", **sizes)
    command = [sys.executable, "-c", MEASURE, str(checkpoint), str(large)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, weights, layer = map(int, out.split())
    assert weights > 8 * layer > 100_000_000
    assert 0.9 * weights < peak < weights + layer
