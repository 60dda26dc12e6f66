"""The bill of materials names what is installed."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "sbom.py"


def test_each_package_has_its_version_and_address() -> None:
    printed = subprocess.run([sys.executable, SCRIPT], check=True, capture_output=True, text=True, timeout=60).stdout
    document = json.loads(printed)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    found = {component["purl"]: component for component in document["components"]}
    assert len(found) == len(document["components"]), "references must differ"
    for name in ("grpcio", "prometheus-client"):
        assert found[f"pkg:pypi/{name}@{version(name)}"]["version"] == version(name)
