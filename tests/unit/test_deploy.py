"""The deployment files hold: manifests match their schemas, and every variable belongs to the service that gets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from baton.config import load
from decode_svc.config import DecodeConfig
from prefill_svc.config import PrefillConfig
from router.config import RouterConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
CONFIGS = {"router": RouterConfig, "prefill_svc": PrefillConfig, "decode_svc": DecodeConfig}


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(BASE.glob("*.yaml")):
        if path.name != "kustomization.yaml":
            for document in yaml.safe_load_all(path.read_text()):
                yield f"{document['kind']}/{document['metadata']['name']}", document


def kustomization() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    return document


def kubernetes_environments() -> Iterator[tuple[str, dict[str, str]]]:
    """Module and environment of each of our containers; values from secrets and fields are stood in for."""
    common = dict(text.split("=", 1) for text in kustomization()["configMapGenerator"][0]["literals"])
    for _, document in manifests():
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                if container["image"] == "baton":
                    own = {entry["name"]: entry.get("value", "stand-in") for entry in container["env"]}
                    yield container["command"][-1], common | own


def compose_environments() -> Iterator[tuple[str, dict[str, str]]]:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        if service["image"].startswith("baton"):
            texts = {name: str(value) for name, value in service["environment"].items()}
            yield service["command"][-1], {name: text for name, text in texts.items() if "${" not in text}


@pytest.mark.parametrize("manifest", [pytest.param(document, id=name) for name, document in manifests()])
def test_manifest_matches_its_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.37", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**manifest, "spec": {**manifest["spec"], "unknown": 1}}, "1.37", strict=True)


def test_kustomization_lists_every_manifest() -> None:
    files = {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization()["resources"]) == files


@pytest.mark.parametrize("environments", [kubernetes_environments, compose_environments])
def test_services_understand_their_environment(environments: Any) -> None:
    seen = dict(environments())
    assert seen.keys() == CONFIGS.keys()
    for module, environment in seen.items():
        config_class: Any = CONFIGS[module]
        config = load(config_class, module, [], environment)
        fields = {field.name for field in dataclasses.fields(config_class)}
        foreign = {name for name in environment if name.removeprefix("BATON_").lower() not in fields}
        assert not foreign, f"{module} has no use for {foreign}"
        assert config.insecure
