"""Places of the peers: a folder outside the project, or paths from the environment.

PEERS_DIR (default ~/.cache/baton-peers) holds an environment for each peer, the checkpoint and its GGUF.
PEERS_VLLM and PEERS_LLAMA name the Python of environments that are there already, PEERS_MODEL and PEERS_GGUF the files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RUNNERS = Path(__file__).parent / "runners"


@dataclass(frozen=True, slots=True)
class Places:
    """Pythons of the environments, the checkpoint and the GGUF."""

    vllm: Path
    llama: Path
    model: Path
    gguf: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Places:
        """Places from environment variables."""
        root = Path(environ.get("PEERS_DIR") or Path.home() / ".cache" / "baton-peers").expanduser()
        found = {
            "vllm": root / "vllm" / "bin" / "python",
            "llama": root / "llama" / "bin" / "python",
            "model": root / "qwen2.5-0.5b-random",
            "gguf": root / "qwen2.5-0.5b-random.bf16.gguf",
        }
        return cls(**{name: Path(environ.get(f"PEERS_{name.upper()}") or path) for name, path in found.items()})

    def missing(self) -> list[str]:
        """Names of missing parts, in words."""
        return [f"{name}: {path}" for name in self.__slots__ if not (path := getattr(self, name)).exists()]

    def command(self, peer: str) -> list[str]:
        """The command of a peer's runner."""
        python = {"vllm": self.vllm, "llama": self.llama}.get(peer, Path(sys.executable))
        model = self.gguf if peer == "llama" else self.model
        return [str(python), str(RUNNERS / f"run_{peer}.py"), str(model), "--threads=2"]


def from_environment() -> Places:
    """The places; ends the process when something is not there."""
    places = Places.of(os.environ)
    if missing := places.missing():
        raise SystemExit("\n".join(["not there (see python -m bench.peers.install):", *missing]))
    return places
