"""Workers of one host hold packed weights once: real processes, and the memory that the kernel counts for them."""

import asyncio
import re
from asyncio.subprocess import Process
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.integration.test_worker_processes import START_S, start
from tests.kernels import needs_native

pytestmark = needs_native

KV = 16 << 20


def proportional(process: Process) -> int:
    """Bytes of a process's memory; what it shares is divided by those that share it."""
    return int(re.findall(r"^Pss: +(\d+) kB", of(process, "smaps_rollup"), re.MULTILINE)[0]) << 10


def of(process: Process, name: str) -> str:
    """Figures from the kernel about a process."""
    return Path(f"/proc/{process.pid}/{name}").read_text(encoding="utf-8")


async def listening(module: str, checkpoint: Path, *flags: str) -> Process:
    process = await start(
        module, f"--model={checkpoint}", f"--kv-memory={KV}", "--kernels=native", "--dtype=float32", *flags
    )
    assert process.stderr is not None
    async with asyncio.timeout(START_S):
        assert (await process.stdout.readline()).startswith(b"listening")
    return process


async def test_two_workers_hold_weights_once(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(
        "qwen2", tmp_path, tied=True, hidden_size=768, intermediate_size=3072, num_hidden_layers=3, vocab_size=20_000
    )
    weights = (checkpoint / "model.safetensors").stat().st_size
    assert weights > 100 << 20
    shared = f"--packed-weights={tmp_path / 'packed'}"
    workers = []
    try:
        for module, *flags in (("prefill_svc", shared), ("decode_svc", shared), ("decode_svc",)):
            workers.append(await listening(module, checkpoint, *flags))
        sizes = [proportional(worker) for worker in workers]
        maps = [of(worker, "maps") for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            await worker.communicate()
    # A worker without its weights: a runtime and a KV pool.
    rest = sizes[2] - weights
    assert sum(sizes[:2]) < weights + 2 * rest + weights // 4
    assert not any("model.safetensors" in each for each in maps)
    assert sizes[2] > weights
