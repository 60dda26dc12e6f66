"""Files of a checkpoint that a router reads at its start, and its words about them."""

import json
import logging
import shutil
from pathlib import Path

import pytest

import router.app
from baton import bundled
from baton.config.router import RouterConfig


@pytest.mark.parametrize(("choice", "found"), [("auto", {"temperature": 0.5, "top_k": 7}), ("none", {})])
def test_defaults_of_sampling_and_a_missing_tokenizer_are_logged(
    choice: str, found: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shutil.copy(bundled.path() / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 7}))
    workers = {"prefill": ("h:1",), "decode": ("h:2",)}
    config = RouterConfig(**workers, model=str(tmp_path), generation_config=choice)
    model, _, _ = router.app._load(config)
    assert (model.tokenizer, model.default_sampling) == (None, found)
    assert "the checkpoint has no tokenizer.json: prompts must be token ids" in caplog.text
    told = "sampling defaults from generation_config.json: temperature 0.5, top_k 7"
    assert (told in caplog.text) == (choice == "auto")
