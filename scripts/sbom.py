"""Print the software bill of materials of the environment that runs this, in CycloneDX 1.6; standard library only.

    docker run --rm --interactive localhost/baton:0.1.0 python3 - < scripts/sbom.py > baton-0.1.0.cdx.json

Components are the Python packages on sys.path, and Debian's packages if dpkg is there.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from typing import Any
from urllib.parse import quote


def python_packages() -> Iterator[dict[str, Any]]:
    """A component for each installed distribution; of two with one name, the one that is imported."""
    seen = set()
    for found in distributions():
        name = found.name.lower().replace("_", "-").replace(".", "-")
        if name not in seen:
            seen.add(name)
            component = _component(name, found.version, f"pkg:pypi/{name}@{quote(found.version)}")
            yield component | ({"licenses": licenses} if (licenses := _licenses(found)) else {})


def debian_packages() -> Iterator[dict[str, Any]]:
    """A component for each package that is installed."""
    if not shutil.which("dpkg-query"):
        return
    query = ["dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"]
    for line in subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines():
        status, name, version, architecture = line.split("\t")
        if status.strip() == "ii":
            url = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}"
            yield _component(name, version, url)


def bill() -> dict[str, Any]:
    """The whole document."""
    components = sorted((*python_packages(), *debian_packages()), key=lambda each: each["purl"])
    python = _component("python", platform.python_version(), f"pkg:generic/python@{platform.python_version()}")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [*components, python],
    }


def _component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _licenses(found: Distribution) -> list[dict[str, str]]:
    # An SPDX expression, where the package has one.
    key = "License-Expression"
    return [{"expression": found.metadata[key]}] if key in found.metadata else []


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=1)
    print()
