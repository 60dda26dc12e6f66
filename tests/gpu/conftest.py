"""These tests need a CUDA device and are collected only where there is one."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
