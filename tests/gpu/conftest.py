"""These tests need a CUDA device and are collected only where there is one."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.contract.conftest import engine

__all__ = ["engine"]

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))
