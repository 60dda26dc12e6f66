"""The CPU-reachable part of the GPU bench: a tiny model through every measurement, and the message without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import gpu

PLAN = gpu.Plan(
    prompts=(24,),
    batches=(1, 3),
    context=20,
    steps=3,
    repeats=1,
    gemm=32,
    probe_bytes=1 << 12,
    max_model_len=64,
    page_size=8,
    peer_batch=3,
)


def test_every_figure_is_there_and_positive() -> None:
    bench = gpu.Bench(gpu.TINY, torch.device("cpu"), PLAN)
    results = gpu.measure(bench)
    assert set(results["prefill"]) == {"24"}
    assert set(results["decode"]) == {"1", "3", "eager", "no step ahead", "eager, no step ahead"}
    figures = [results["peaks"], results["peaks_after"], results["overlap"]]
    figures += [*results["prefill"].values(), results["decode"]["1"], results["decode"]["eager"]["3"]]
    for each in figures:
        assert all(value > 0 for value in each.values()), each
    ours, peer = results["decode"]["3"], results["transformers"]
    assert results["over_transformers"] == pytest.approx(ours["tokens_per_s"] / peer["tokens_per_s"])
    assert ours["tokens_per_s"] == pytest.approx(3e3 / ours["step_ms"])


def test_without_cuda_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench/gpu.py"])
    with pytest.raises(SystemExit, match="no CUDA device; nothing was measured"):
        gpu.main()
