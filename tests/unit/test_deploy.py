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
SECURE = DEPLOY / "kubernetes" / "secure"
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


def patched(base: Any, patch: Any) -> Any:
    """What kustomize makes of the two, as far as our patches go: objects merge, lists merge by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: patched(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and isinstance(patch, list):
        entries = {entry["name"]: entry for entry in base}
        return list((entries | {entry["name"]: patched(entries.get(entry["name"]), entry) for entry in patch}).values())
    return patch


def overlay() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((SECURE / "kustomization.yaml").read_text())
    return document


def secure_deployments() -> Iterator[dict[str, Any]]:
    originals = dict(manifests())
    for entry in overlay()["patches"]:
        patch = yaml.safe_load((SECURE / entry["path"]).read_text())
        yield patched(originals[f"Deployment/{patch['metadata']['name']}"], patch)


def literals(document: dict[str, Any]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in document["configMapGenerator"][0]["literals"])


def secure_kubernetes() -> Iterator[tuple[str, dict[str, str], set[str]]]:
    """Module, environment and mounted directories of each of our containers."""
    common = literals(kustomization()) | literals(overlay())
    for document in secure_deployments():
        (container,) = document["spec"]["template"]["spec"]["containers"]
        own = {entry["name"]: entry.get("value", "stand-in") for entry in container["env"]}
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        yield container["command"][-1], common | own, mounts


def secure_compose() -> Iterator[tuple[str, dict[str, str], set[str]]]:
    """Module, environment and mounted files of each of our services."""
    base = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    secure = yaml.safe_load((DEPLOY / "compose.secure.yaml").read_text())
    for name, service in secure["services"].items():
        merged = {key: str(value) for key, value in (base[name]["environment"] | service["environment"]).items()}
        assert set(service["secrets"]) <= set(secure["secrets"])
        texts = {key: "stand-in" if ":?" in text else text for key, text in merged.items()}
        environment = {key: text for key, text in texts.items() if "${" not in text}
        yield base[name]["command"][-1], environment, {f"/run/secrets/{secret}" for secret in service["secrets"]}


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


@pytest.mark.parametrize("environments", [secure_kubernetes, secure_compose])
def test_secure_services_have_their_files_and_are_not_insecure(environments: Any) -> None:
    seen = {module: rest for module, *rest in environments()}
    assert seen.keys() == CONFIGS.keys()
    for module, (environment, mounts) in seen.items():
        config: Any = load(CONFIGS[module], module, [], environment)
        fields = {field.name for field in dataclasses.fields(config)}
        foreign = {name for name in environment if name.removeprefix("BATON_").lower() not in fields}
        assert not foreign, f"{module} has no use for {foreign}"
        assert not config.insecure
        keys = {"ticket_key", "api_keys"} if module == "router" else {"ticket_keys"}
        assert module == "decode_svc" or config.fleet_secret
        for name in {"tls_cert", "tls_key", "tls_ca", *keys}:
            path = Path(getattr(config, name))
            assert {str(path), str(path.parent)} & mounts, f"{module} has no {name}"


@pytest.mark.parametrize("document", [pytest.param(d, id=d["metadata"]["name"]) for d in secure_deployments()])
def test_secure_deployment_matches_its_schema(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.37", strict=True)
    pod = document["spec"]["template"]["spec"]
    assert {"home", "tmp", "tls", "ticket"} <= {volume["name"] for volume in pod["volumes"]}
    probes = {kind: pod["containers"][0][f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
    assert all(probe["httpGet"]["port"] == "ops" for probe in probes.values()), "probes can't do mutual TLS"


def test_the_overlay_lists_every_patch() -> None:
    files = {path.name for path in SECURE.glob("*.yaml")} - {"kustomization.yaml"}
    assert {entry["path"] for entry in overlay()["patches"]} == files
    assert overlay()["resources"] == ["../base"]
    assert overlay()["configMapGenerator"][0]["behavior"] == "merge"
