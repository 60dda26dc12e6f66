"""Cost of a decode step beside its arithmetic, with the worker's loop, service and messages, without a profiler.

    python -m bench.overhead CHECKPOINT [--batch 32] [--context 128] [--steps 32] [--dtype D]

A batch decodes on one thread, as in a worker: engine thread, scheduler, reports to the asyncio loop, a message a step
for the router, serialised, all in one interpreter. No KV is fetched, and no socket is written to. The engine has the
layers and operators of CHECKPOINT, and tensors of next to nothing, so that arithmetic has no part in it:

    dispatch_ms          CPU time of the forward pass: Python, torch's dispatcher, and what kernels take whatever their
                         size. An upper bound of what dispatch adds to a step.
    outside_forward_ms   from the end of a forward pass to the begin of the next: logits and sampling at that width,
                         tokens read back, the loop's turn, messages made and serialised.
    outside_native_ms    with native kernels: from the end of a step's native call to the begin of the next one's.

The first two follow each other, so a step's overhead is their sum; with native kernels it is the third. CPU only:
elsewhere a forward pass is over later than its call. Writes bench/results/overhead.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from baton.config.worker import DecodeConfig
from baton.engine.contract import KvHandle, OnLayer
from baton.engine.core import EngineCore
from baton.engine.executor import InProcessExecutor
from baton.engine.factory import build
from baton.engine.plan import ForwardPlan
from baton.model.checkpoint import resolve
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.native.library import NativeUnavailable, load
from baton.process.executors import EngineThread
from baton.request import CachePolicy, FirstToken, Handoff, RemoteExport, SamplingParams, TokenInfo
from baton.transfer.export import ExportRegistry
from baton.worker.start import open_cache
from baton.worker.status import WorkerRole, new_identity
from bench.common import save
from decode_svc.messages import AttemptKey, Reserve, Start
from decode_svc.service import DecodeService
from decode_svc.servicer import down_to_proto

_WARM_STEPS = 4
_TOKEN = 1
WIDTH, VOCABULARY = 8, 1024
_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": WIDTH,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Passes:
    """Begin and end of forward passes of a whole batch."""

    def __init__(self, engine: EngineCore, batch: int) -> None:
        self.times: list[tuple[float, float]] = []
        self.cpu_s: list[float] = []
        assert isinstance(engine.executor, InProcessExecutor)
        runner = engine.executor.runner
        forward = runner.forward

        def timed(plan: ForwardPlan, on_layer: OnLayer | None) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            hidden = forward(plan, on_layer)
            if len(plan.rows) == batch:
                self.cpu_s.append(time.thread_time() - cpu)
                self.times.append((began, time.perf_counter()))
            return hidden

        runner.forward = timed  # type: ignore[method-assign]

    def summary(self, native: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Medians in milliseconds, without those that warm up; `native`: when native calls began and ended."""
        steady = self.times[_WARM_STEPS:]
        found = {
            "dispatch_ms": 1e3 * statistics.median(self.cpu_s[_WARM_STEPS:]),
            "outside_forward_ms": _between_ms(steady),
        }
        if calls := [call for call in native if any(began <= call[0] < ended for began, ended in steady)]:
            found["outside_native_ms"] = _between_ms(calls)
        return found


def _between_ms(spans: Sequence[tuple[float, float]]) -> float:
    return 1e3 * statistics.median(later[0] - earlier[1] for earlier, later in pairwise(spans))


@contextlib.contextmanager
def native_calls() -> Iterator[list[tuple[float, float]]]:
    """Begin and end of native forward passes in the meantime; none where the library is not built."""
    calls: list[tuple[float, float]] = []
    try:
        library = load()
    except NativeUnavailable:
        yield calls
        return
    forward = library.baton_native_forward

    def timed(*arguments: Any) -> int:
        began = time.perf_counter()
        status: int = forward(*arguments)
        calls.append((began, time.perf_counter()))
        return status

    library.baton_native_forward = timed  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        library.baton_native_forward = forward  # type: ignore[attr-defined]


def write_tiny(model: Path, directory: Path) -> Path:
    """Write to `directory` what `model` is but for its sizes: hidden size 8, one head, 1,024 ids, random weights."""
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(raw | _SIZES), encoding="utf-8")
    config = ModelConfig.from_pretrained(directory)
    decoder = Decoder(config, TensorOptions(torch.float32, torch.device("cpu")), TensorParallel())
    draw = torch.Generator().manual_seed(0)
    slots = [*decoder.checkpoint_tensors(), *(() if config.tie_word_embeddings else (decoder.head_tensor(),))]
    tensors = {slot.name: torch.randn(slot.shape, generator=draw).bfloat16() for slot in slots}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def measure(config: DecodeConfig, batch: int, context: int, steps: int) -> Passes:
    """Run a batch to its end."""
    thread = EngineThread()
    engine = await thread.run(build, config.engine_config())
    params = SamplingParams(max_tokens=_WARM_STEPS + steps + batch, temperature=0.0, ignore_eos=True, seed=0)
    prompt = [_TOKEN] * context
    passes = Passes(engine, batch)

    async def fetched(source: RemoteExport, handle: KvHandle, *, tokens: int, first: int) -> Handoff:
        return Handoff(source.transfer_id, 0, prompt, (), params, (FirstToken(0, TokenInfo(_TOKEN)),))

    identity = new_identity(config, WorkerRole.DECODE, engine.spec, "", converts_kv=False)
    cache = open_cache(config, engine.spec.kv_format)
    service = DecodeService(config, engine, identity, fetched, ExportRegistry(engine, identity.incarnation), cache)
    turning = service.start(thread)
    try:
        session = service.worker.open_session("overhead")
        keys = [AttemptKey(str(number), 0) for number in range(batch)]
        assert params.max_tokens is not None
        for key in keys:
            reserve = Reserve(key, context, params.max_tokens, 1, cache=CachePolicy.OFF)
            service.worker.handle(session, reserve)
            service.worker.handle(session, Start(key, RemoteExport(key.request_id, "", ())))
        left = batch
        async for down in session.messages():
            down_to_proto(down).SerializeToString()
            if down.failures:
                raise RuntimeError(down.failures[0][1].message)
            left -= sum(output.finish is not None for _, output in down.outputs)
            if not left:
                break
    finally:
        await service.close(turning)
        await cache.close()
        await thread.close()
        engine.close()
    return passes


def overhead(model: Path, batch: int, context: int, steps: int, dtype: str = "auto") -> dict[str, float]:
    """Figures listed in the module's docstring, of the checkpoint at `model`: medians over `steps` steps of `batch`."""
    longest = context + _WARM_STEPS + steps + batch + 1
    with tempfile.TemporaryDirectory(prefix="baton-tiny-") as folder:
        config = DecodeConfig(
            model=str(write_tiny(model, Path(folder))),
            served_model_name="m",
            device="cpu",
            dtype=dtype,
            threads=1,
            slots=batch,
            max_model_len=longest,
            kv_memory=256 << 20,
            reserve_tokens=longest,
        )
        with native_calls() as calls:
            return asyncio.run(measure(config, batch, context, steps)).summary(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("batch", 32), ("context", 128), ("steps", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    found = overhead(resolve(given.model), given.batch, given.context, given.steps, given.dtype)
    save("overhead", {**vars(given), **found})


if __name__ == "__main__":
    main()
