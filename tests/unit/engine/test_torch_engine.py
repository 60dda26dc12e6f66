"""The torch engine alone: the build from a config, equality with transformers, failures of the model."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.engine import factory, model_runner
from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.executor import InProcessExecutor
from baton.engine.factory import build
from baton.errors import ConfigError, EngineError
from baton.kv.format import KvFormat, attention_parts
from baton.model.attention import KvCache, SegmentRing
from baton.model.zeros import RegistrationError
from baton.request import SamplingParams
from tests.checkpoints import lively_prompt, load_reference
from tests.contract.engines import MIXED, advance, compute_between_layers, generate, ignore, prefill, start, state, step
from tests.engine_calls import prefill_chunk
from tests.kernels import KERNELS
from tests.unit.engine.cuda_standin import Cuda, cuda

__all__ = ["cuda"]


def engine_of(checkpoint: Path, **fields: Any) -> EngineCore:
    defaults = {"device": "cpu", "slots": 4, "kv_memory": 8 << 20, "threads": 1}
    return build(EngineConfig(str(checkpoint), **{**defaults, **fields}))


def runner_of(engine: EngineCore) -> Any:
    assert isinstance(engine.executor, InProcessExecutor)
    return engine.executor.runner


def test_the_spec_tells_what_was_built(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, block_size=32, page_size=8)
    spec = engine.spec
    assert (spec.vocab_size, spec.max_model_len, spec.slots, spec.page_size) == (264, 1024, 4, 8)
    assert spec.eos_token_ids == {257}
    assert [(part.name, part.dtype, part.shape) for part in spec.kv_format.parts] == [
        ("k", "float32", (2, 24)),
        ("v", "float32", (2, 24)),
    ]
    assert (spec.kv_format.layers, spec.kv_format.block_size) == (3, 32)
    assert spec.pages == (8 << 20) // (spec.kv_format.token_bytes * 8)
    assert len(spec.fingerprint) == 64


def test_dtypes_come_from_the_checkpoint_or_the_config(checkpoint: Path, tmp_path: Path) -> None:
    assert engine_of(checkpoint, dtype="bfloat16").spec.kv_format.parts[0].dtype == "bfloat16"
    mixed = engine_of(checkpoint, dtype="float32", kv_dtype="float16")
    assert mixed.spec.kv_format.parts[0].dtype == "float16"
    assert engine_of(checkpoint).spec.fingerprint != engine_of(checkpoint, dtype="bfloat16").spec.fingerprint
    config = json.loads((checkpoint / "config.json").read_text())
    for dtype, expected in (("bfloat16", "bfloat16"), ("float16", "float32")):
        saved = tmp_path / dtype
        shutil.copytree(checkpoint, saved)
        (saved / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        assert engine_of(saved).spec.kv_format.parts[0].dtype == expected


def test_a_model_for_long_sequences_has_larger_pages(checkpoint: Path, tmp_path: Path) -> None:
    saved = tmp_path / "long"
    shutil.copytree(checkpoint, saved)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 20}))
    assert engine_of(saved, page_size=0).spec.page_size == 128
    assert engine_of(saved, page_size=0, max_model_len=4096).spec.page_size == 16


def test_bad_sizes_name_the_field(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len: 2000 is above the model's 1024"):
        engine_of(checkpoint, max_model_len=2000)
    with pytest.raises(ConfigError, match=r"kv_memory: 100 bytes \(given\) hold no page, which has 18432 bytes"):
        engine_of(checkpoint, kv_memory=100)
    with pytest.raises(ConfigError, match="device: cuda:99"):
        engine_of(checkpoint, device="cuda:99")


def test_automatic_memory_is_a_share_of_what_is_free(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory.host_memory, "available", lambda: 50 << 20)
    page_bytes = 18432
    small = engine_of(checkpoint, kv_memory=0)
    assert small.spec.pages == int((50 << 20) * 0.15) // page_bytes
    bounded = engine_of(checkpoint, kv_memory=0, max_model_len=64, slots=2)
    assert bounded.spec.pages == (2 + 8) * 4
    monkeypatch.setattr(factory.host_memory, "available", lambda: 1000)
    with pytest.raises(ConfigError, match=r"kv_memory: 150 bytes \(automatic\) hold no page, which has 18432 bytes"):
        engine_of(checkpoint, kv_memory=0)
    with pytest.raises(
        ConfigError, match=r"page_size: a page of 32 tokens has 36864 bytes, .* 150 bytes \(automatic\)"
    ):
        engine_of(checkpoint, kv_memory=0, page_size=32)


def test_more_memory_than_there_is_names_the_field(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory.host_memory, "available", lambda: 50 << 20)
    monkeypatch.setattr(factory, "load_model", lambda *_, **__: pytest.fail("loaded first"))
    with pytest.raises(
        ConfigError, match=f"kv_memory: {900 << 30} bytes are asked for, {50 << 20} bytes are available"
    ):
        engine_of(checkpoint, kv_memory=900 << 30)


def test_greedy_equals_transformers(checkpoint: Path) -> None:
    model = load_reference(checkpoint)
    prompt, reference = lively_prompt(model, 40, 48)
    engine = engine_of(checkpoint, page_size=7)
    assert generate(engine, state(prompt), 48) == reference.token_ids


def test_log_probabilities_equal_transformers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Seven rows of logits at a time.
    monkeypatch.setattr(model_runner, "_LOGITS_AT_ONCE", 7 * 264)
    engine = engine_of(checkpoint)
    prompt = list(range(50, 80))
    with torch.inference_mode():
        expected = load_reference(checkpoint)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    handle = engine.reserve("a/1", 40)
    params = SamplingParams(temperature=0.0, logprobs=3)
    result = prefill_chunk(
        engine, handle, prompt, 0, 30, on_layer=ignore, sample=[state(prompt, params)], prompt_logprobs=2
    )
    for position, info in enumerate(result.prompt_logprobs):
        assert info.token_id == prompt[position + 1]
        assert info.logprob == pytest.approx(float(expected[position, info.token_id]), abs=1e-4)
        best = expected[position].topk(2)
        assert [token for token, _ in info.top] == best.indices.tolist()
        assert [logprob for _, logprob in info.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    (token,) = result.tokens
    assert token.token_id == int(expected[-1].argmax())
    assert len(token.top) == 3


def test_errors_of_the_model_become_engine_errors(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(checkpoint, kernels="torch")
    handle, outputs = start(engine, "a/1", state(list(range(10))))

    def fail(*_args: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner_of(engine)._decoder, "forward", fail)
        with pytest.raises(EngineError, match="RuntimeError: out of memory"):
            engine.launch()
        with pytest.raises(EngineError, match="out of memory"):
            prefill(engine, engine.reserve("b/1", 10), state([1, 2, 3]))
    assert [*outputs, step(engine)[handle]] == generate(engine_of(checkpoint), state(list(range(10))), 2)

    def abort(_layer: int) -> None:
        raise RuntimeError("from the caller")

    with pytest.raises(RuntimeError, match="from the caller"):
        prefill_chunk(engine, engine.reserve("c/1", 10), [1, 2], 0, 2, on_layer=abort)


def test_chunks_between_layers_take_no_segment(checkpoint: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def ring(kv: KvCache, size: int) -> SegmentRing:
        return SegmentRing(kv, torch.device("cpu"), 3, size)

    monkeypatch.setattr(factory, "SegmentViews", ring)
    engine = engine_of(checkpoint, kernels="torch", kv_home="host", segment_tokens=16)
    compute_between_layers(engine, [3 * i % 256 for i in range(60)], [7 * i % 256 for i in range(45)])


@pytest.mark.parametrize("layer", range(3))
def test_a_step_failed_between_layers_runs_again(checkpoint: Path, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(checkpoint, kernels="torch")
    wanted = [state(list(range(20 + 25 * i)), params) for i, params in enumerate(MIXED[:3])]
    expected = [generate(engine_of(checkpoint), one, 8) for one in wanted]
    running = [start(engine, f"a/{i}", one) for i, one in enumerate(wanted[:2])]

    def fail(*_args: Any) -> None:
        raise RuntimeError("out of memory")

    for turn in range(7):
        if turn == 2:
            running.append(start(engine, "a/2", wanted[2]))
        with monkeypatch.context() as patch:
            patch.setattr(runner_of(engine)._decoder.layers[layer].attention, "attend", fail)
            for _ in range(turn % 3):
                with pytest.raises(EngineError, match="out of memory"):
                    engine.launch()
        advance(engine, running)
    assert [outputs for _, outputs in running] == [expected[0], expected[1], expected[2][:6]]


@pytest.mark.parametrize("kernels", KERNELS)
def test_work_within_a_layer_is_counted_while_it_is_done(checkpoint: Path, tmp_path: Path, kernels: str) -> None:
    tokens, end = 100, 1 << 16
    saved = tmp_path / "long"
    shutil.copytree(checkpoint, saved)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "max_position_embeddings": end}))
    engine = engine_of(saved, kernels=kernels, kv_memory=80 << 20)
    handle, ended, seen = engine.reserve("a/1", end), list[int](), set[int]()

    def compute() -> None:
        prefill_chunk(
            engine, handle, [1] * end, end - tokens, end, on_layer=lambda _: ended.append(engine.work_counter())
        )

    with ThreadPoolExecutor(1) as thread:
        # A busy machine may look too seldom.
        for _ in range(20):
            ended.clear()
            seen.clear()
            call = thread.submit(compute)
            while not call.done():
                seen.add(engine.work_counter())
            call.result()
            first, second, _ = ended
            if any(first < number < second for number in seen):
                break
        else:
            pytest.fail("the number changed only after a layer")
    # With native kernels each unit of queries attends to 64 parts of the keys.
    assert second - first >= (2 if kernels == "torch" else 3 * 2 * 63)


def test_native_kernels_run_on_a_cpu_alone() -> None:
    with pytest.raises(ConfigError, match=r"^kernels: native ones run on a CPU, the device is meta"):
        factory.kernels_for("native", torch.device("meta"))


def test_threads_are_set(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    engine_of(checkpoint, threads=0)
    engine_of(checkpoint, threads=3)
    assert seen == [3]


def test_pages_lie_where_kv_home_says(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 18432

    def homes(**settings: Any) -> tuple[int, int]:
        spec = engine_of(checkpoint, kv_memory=5 * page_bytes, **settings).spec
        return spec.device_pages, spec.host_pages

    assert homes() == homes(kv_home="device") == (5, 0)
    assert homes(kv_home="host") == (0, 5)
    assert homes(host_memory=3 * page_bytes + 1) == (5, 3)
    with pytest.raises(ConfigError, match=r"host_memory: 100 bytes hold no page, which has 18432 bytes"):
        homes(host_memory=100)
    with pytest.raises(ConfigError, match="host_memory: is for kv_home auto, with host kv_memory sizes the pool"):
        homes(kv_home="host", host_memory=page_bytes)
    with pytest.raises(ConfigError, match="kv_home: must be auto, device, host, got 'disk'"):
        homes(kv_home="disk")
    monkeypatch.setattr(factory.host_memory, "available", lambda: 50 << 20)
    with pytest.raises(ConfigError, match=r"host_memory with kv_memory: \d+ bytes are asked for, 52428800 bytes are"):
        homes(host_memory=900 << 30)


def test_the_longest_sequence_gets_its_pages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(factory.host_memory, "available", lambda: 1 << 30)
    config, cuda = EngineConfig("unused"), torch.device("cuda")
    assert factory._host_pages(config, 1 << 20, 99, 100, cuda) == 100
    assert factory._host_pages(config, 1 << 20, 100, 100, cuda) == 0
    assert factory._host_pages(config, 1 << 20, 99, 100, torch.device("cpu")) == 0
    assert factory._host_pages(EngineConfig("unused", kv_home="device"), 1 << 20, 99, 100, cuda) == 0
    assert not caplog.messages
    monkeypatch.setattr(factory.host_memory, "available", lambda: 100 << 20)
    assert factory._host_pages(config, 1 << 20, 99, 100, cuda) == 15
    assert "hold 15 of its 100 pages: raise --host-memory" in caplog.text


def test_copies_of_kv_have_the_bytes_of_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "measure_rates", lambda *_: (1e12, 1e9))
    model = SimpleNamespace(dtype=torch.float32, config=SimpleNamespace(num_heads=8, num_kv_heads=8))
    for kv_dtype, tokens in ((torch.float32, 2_000), (torch.bfloat16, 1_000)):
        assert factory._min_overlap_chunk(cast(Any, model), kv_dtype, torch.device("cuda")) == tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_memory": 5 << 30}, f"host_memory: {5 << 30}: refused"),
        ({}, "host_memory: automatic: refused"),
        ({"kv_home": "host", "kv_memory": 3 << 30}, f"kv_memory: {3 << 30}: refused"),
    ],
)
def test_host_memory_that_cuda_does_not_register_names_the_field(settings: Any, message: str) -> None:
    def refuse(*_: object) -> None:
        raise RegistrationError("refused")

    kv_format = KvFormat(attention_parts("float32", 1, 8), 1, 16)
    spec = SimpleNamespace(device_pages=1, host_pages=2, page_size=16, kv_format=kv_format)
    model = SimpleNamespace(device=torch.device("cuda"), new_kv_cache=refuse)
    with pytest.raises(ConfigError, match=f"^{message}$"):
        factory.make_kv_cache(EngineConfig("unused", **settings), cast(Any, model), cast(Any, spec))


def test_both_pools_of_a_cpu_must_fit_its_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory.host_memory, "available", lambda: 50 << 20)
    with pytest.raises(
        ConfigError, match=rf"host_memory with kv_memory: 629\d+ bytes are asked for, {50 << 20} bytes are"
    ):
        engine_of(checkpoint, kv_memory=30 << 20, host_memory=30 << 20)
    for home, field in (("auto", "host_memory"), ("device", "cache_memory"), ("host", "cache_memory")):
        with pytest.raises(ConfigError, match=r"host_memory with kv_memory: \d+ bytes are asked for"):
            engine_of(checkpoint, kv_memory=0, kv_home=home, **{field: 49 << 20})
