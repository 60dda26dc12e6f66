"""The model fingerprint: equal for equal models wherever they lie, others for all that compute otherwise."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.load import load_model
from baton.errors import ModelError
from baton.model import fingerprint
from baton.model.config import ModelConfig
from baton.model.fingerprint import cache_folder, model_fingerprint, weights_digest
from tests.checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint("qwen2", tmp_path / "model")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose contents were hashed."""
    names: list[str] = []
    real = fingerprint._hash

    def spy(file: Any, report: Any) -> str:
        names.append(Path(file.name).name)
        return real(file, report)

    monkeypatch.setattr(fingerprint, "_hash", spy)
    return names


def test_an_unchanged_weight_file_is_hashed_only_once(checkpoint: Path, hashed: list[str]) -> None:
    first = weights_digest(checkpoint)
    assert weights_digest(checkpoint) == first
    assert hashed == ["model.safetensors"]
    assert len(list(cache_folder().iterdir())) == 1


def test_the_weights_digest_ignores_paths_and_file_names(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert load_model(copy, dtype=torch.float32).fingerprint == load_model(checkpoint, dtype=torch.float32).fingerprint


def test_changed_content_is_noticed_at_equal_size(checkpoint: Path, hashed: list[str]) -> None:
    first = weights_digest(checkpoint)
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_digest(checkpoint) != first
    assert len(hashed) == 2


def test_every_shard_counts(tmp_path: Path) -> None:
    sharded = make_checkpoint("llama", tmp_path / "sharded", max_shard_size="100KB")
    first = weights_digest(sharded)
    file = sorted(sharded.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes() + b"x")
    assert weights_digest(sharded) != first


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": "other", "sha256": "00"}', '{"sha256": 5}'])
def test_a_damaged_cache_entry_is_ignored(checkpoint: Path, hashed: list[str], damage: str) -> None:
    first = weights_digest(checkpoint)
    (entry,) = cache_folder().iterdir()
    entry.write_text(damage)
    assert weights_digest(checkpoint) == first
    assert len(hashed) == 2


def test_an_unwritable_cache_is_no_error(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert len(weights_digest(checkpoint)) == 64


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds neither model.safetensors"):
        weights_digest(tmp_path)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache" / "baton" / "weights"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/baton/weights")


def test_covers_all_that_decides_k_and_v(checkpoint: Path) -> None:
    config = ModelConfig.from_pretrained(checkpoint)
    base = model_fingerprint(config, "00", "bfloat16")
    others = [
        model_fingerprint(replace(config, rms_norm_eps=1e-5), "00", "bfloat16"),
        model_fingerprint(
            replace(config, layers=tuple(replace(layer, window=20) for layer in config.layers)), "00", "bfloat16"
        ),
        model_fingerprint(replace(config, rope=replace(config.rope, theta=5.0)), "00", "bfloat16"),
        model_fingerprint(config, "01", "bfloat16"),
        model_fingerprint(config, "00", "float32"),
    ]
    assert len({base, *others}) == len(others) + 1
    assert model_fingerprint(replace(config, eos_token_ids=(1, 2), dtype=None), "00", "bfloat16") == base
    assert base == model_fingerprint(config, "00", "bfloat16")
    assert len(base) == 64
