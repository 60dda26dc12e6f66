"""What a measurement's numbers belong to: the machine, the versions, and the commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """`machine` and `commit`, for the head of a JSON report; no commit (None) where this is no git checkout."""
    return {"machine": machine(), "commit": commit()}


def machine() -> dict[str, Any]:
    """What ran it: processor, cores, memory in GiB, Python and the versions that matter."""
    model = re.search(r"model name\s*: (.*)", _text("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+)", _text("/proc/meminfo"))
    return {
        "processor": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "grpcio", "transformers")},
    }


def commit() -> str | None:
    """The commit of the tree, with "+changes" when it has uncommitted ones."""
    here = Path(__file__).parent
    try:
        name = _git(here, "rev-parse", "--short", "HEAD")
        changed = _git(here, "status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+changes" if changed else "")


def _version(package: str) -> str | None:
    """None where it is not installed: a router needs no torch."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(here: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=here, text=True, stderr=subprocess.DEVNULL).strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        # Not Linux.
        return ""
