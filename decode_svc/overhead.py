"""What a decode step costs beside its forward pass, with the worker's own loop, service and messages around it.

    python -m decode_svc.overhead CHECKPOINT [--batch 32] [--context 128] [--steps 32] [--dtype D] [--threads 1]

A batch decodes on an engine of CHECKPOINT, as in a worker: engine thread, scheduler, reports to the asyncio loop, a
message a step for the router, serialised, all in one interpreter. No KV is fetched, and no socket is written to.
Between the end of one forward pass and the begin of the next lie logits and sampling, tokens read back, the turn of
the loop, and whatever the asyncio side takes the interpreter for. Given a checkpoint of next to no width
(`baton.bench.tiny`), arithmetic has no part in it, and the forward pass is what its dispatch costs: the CPU time of the
thread that computes. Prints `{"dispatch_ms": median, "outside_forward_ms": median}`. CPU only: elsewhere a forward pass
is over later than its call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from baton.config.decode import DecodeConfig
from baton.engine.factory import build
from baton.engine.torch_engine import TorchEngine
from baton.request import CachePolicy, FirstToken, Handoff, SamplingParams, TokenInfo
from baton.transfer.exports import Exports
from baton.worker.start import prefix_cache
from baton.worker.status import WorkerRole, new_identity
from baton.worker.thread import EngineThread
from decode_svc.messages import AttemptKey, Reserve, Start
from decode_svc.service import DecodeService
from decode_svc.servicer import down_to_proto

_WARM_STEPS = 4
_TOKEN = 1


class Passes:
    """When forward passes of a whole batch began and ended."""

    def __init__(self, engine: TorchEngine, batch: int) -> None:
        self.times: list[tuple[float, float]] = []
        self.cpu_s: list[float] = []
        forward = engine._forward

        def timed(rows: Sequence[Any]) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            hidden = forward(rows)
            if len(rows) == batch:
                self.cpu_s.append(time.thread_time() - cpu)
                self.times.append((began, time.perf_counter()))
            return hidden

        engine._forward = timed  # type: ignore[method-assign]

    def summary(self) -> dict[str, float]:
        """Medians in milliseconds, without those that warm up."""
        steady = self.times[_WARM_STEPS:]
        between = [later[0] - earlier[1] for earlier, later in pairwise(steady)]
        return {
            "dispatch_ms": 1e3 * statistics.median(self.cpu_s[_WARM_STEPS:]),
            "outside_forward_ms": 1e3 * statistics.median(between),
        }


async def measure(config: DecodeConfig, batch: int, context: int, steps: int) -> dict[str, float]:
    """Run a batch to its end."""
    thread = EngineThread()
    engine = await thread.run(build, config.engine_config())
    params = SamplingParams(max_tokens=_WARM_STEPS + steps + batch, temperature=0.0, ignore_eos=True, seed=0)
    prompt = [_TOKEN] * context
    passes = Passes(engine, batch)

    async def fetched(*_: Any, transfer_id: str, **__: Any) -> Handoff:
        first = FirstToken(0, TokenInfo(_TOKEN), None)
        return Handoff(transfer_id, 0, prompt, (), params, (first,), 0, 0.0)

    identity = new_identity(config, WorkerRole.DECODE, engine.spec, "", converts_kv=False)
    cache = prefix_cache(config, engine.spec.kv_format)
    service = DecodeService(config, engine, identity, fetched, Exports(engine, identity.incarnation), cache)
    turning = service.start(thread)
    try:
        session = service.open_session("overhead")
        keys = [AttemptKey(str(number), 0) for number in range(batch)]
        assert params.max_tokens is not None
        for key in keys:
            reserve = Reserve(key, context, params.max_tokens, 1, cache=CachePolicy.OFF)
            service.handle(session, reserve)
            service.handle(session, Start(key, key.request_id, "127.0.0.1:1", "", None))
        left = batch
        async for down in session.messages():
            down_to_proto(down).SerializeToString()
            if down.failures:
                raise RuntimeError(down.failures[0].message)
            left -= sum(output.finish is not None for output in down.outputs)
            if not left:
                break
    finally:
        await service.close(turning)
        await cache.close()
        await thread.close()
        engine.close()
    return passes.summary()


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("batch", 32), ("context", 128), ("steps", 32), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    longest = given.context + _WARM_STEPS + given.steps + given.batch + 1
    config = DecodeConfig(
        model=given.model,
        served_model_name="m",
        device="cpu",
        dtype=given.dtype,
        threads=given.threads,
        slots=given.batch,
        max_model_len=longest,
        kv_memory=256 << 20,
        reserve_tokens=longest,
    )
    print(json.dumps(asyncio.run(measure(config, given.batch, given.context, given.steps))), flush=True)


if __name__ == "__main__":
    main()
