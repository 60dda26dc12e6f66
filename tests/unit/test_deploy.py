"""The deployment files hold: manifests match their schemas, and every variable belongs to the service that gets it."""

import dataclasses
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kubernetes_validate
import pytest
import yaml

from baton.config import parse_bytes
from baton.config.roles import load
from baton.config.router import RouterConfig
from baton.config.worker import DecodeConfig, PrefillConfig
from tests.redis_server import BINARIES, Server

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
SECURE = DEPLOY / "kubernetes" / "secure"
CONFIGS = {"router": RouterConfig, "prefill_svc": PrefillConfig, "decode_svc": DecodeConfig}


def configured(module: str, environment: dict[str, str]) -> Any:
    """Settings of a service, which must have a use for every variable."""
    settings: Any = CONFIGS[module]
    fields = {field.name for field in dataclasses.fields(settings)}
    foreign = {name for name in environment if name.removeprefix("BATON_").lower() not in fields}
    assert not foreign, f"{module} has no use for {foreign}"
    with patch.dict(os.environ, environment, clear=True):
        return load(settings, [])


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(BASE.glob("*.yaml")):
        if path.name != "kustomization.yaml":
            for document in yaml.safe_load_all(path.read_text()):
                yield f"{document['kind']}/{document['metadata']['name']}", document


def kustomization() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    return document


def test_the_image_has_the_version_of_the_package() -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert {image["newTag"] for image in kustomization()["images"]} == {project["version"]}


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """A container's own variables; what comes from its resources is looked up, from secrets and fields stood in for."""
    found = {}
    for entry in container["env"]:
        if resource := entry.get("valueFrom", {}).get("resourceFieldRef"):
            kind, _, name = resource["resource"].partition(".")
            found[entry["name"]] = container["resources"][kind][name]
        else:
            found[entry["name"]] = entry.get("value", "stand-in")
    return found


def kubernetes_environments() -> Iterator[tuple[str, dict[str, str]]]:
    """Module and environment of each of our containers."""
    common = literals(kustomization())
    for _, document in manifests():
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                if container["image"] == "baton":
                    yield container["command"][-1], common | environment_of(container)


def patched(base: Any, patch: Any) -> Any:
    """Merge of the two as kustomize does it, as far as our patches go: objects merge, lists merge by name."""
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
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        yield container["command"][-1], common | environment_of(container), mounts


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
    for module, texts in compose_texts():
        yield module, {name: text for name, text in texts.items() if "${" not in text}


def compose_texts() -> Iterator[tuple[str, dict[str, str]]]:
    """Module and environment of each of our services, with what comes from the shell as it stands."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        if service["image"].startswith("baton"):
            yield service["command"][-1], {name: str(value) for name, value in service["environment"].items()}


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
        assert configured(module, environment).insecure


def test_workers_start_no_more_threads_than_their_pods_request() -> None:
    seen = dict(kubernetes_environments())
    for role in ("prefill", "decode"):
        (container,) = dict(manifests())[f"Deployment/{role}"]["spec"]["template"]["spec"]["containers"]
        config = configured(f"{role}_svc", seen[f"{role}_svc"])
        assert config.threads == int(container["resources"]["requests"]["cpu"]) > 0


def test_compose_passes_cores_and_processes_on() -> None:
    texts = dict(compose_texts())
    assert texts["router"]["BATON_PROCESSES"] == "${BATON_PROCESSES:-1}"
    cores = [texts[f"{role}_svc"]["BATON_CPUS"] for role in ("prefill", "decode")]
    assert cores == ["${PREFILL_CPUS:-}", "${DECODE_CPUS:-}"]
    for module, environment in texts.items():
        configured(module, {name: shell_default(text) for name, text in environment.items()})


@pytest.mark.parametrize("environments", [secure_kubernetes, secure_compose])
def test_secure_services_have_their_files_and_are_not_insecure(environments: Any) -> None:
    seen = {module: rest for module, *rest in environments()}
    assert seen.keys() == CONFIGS.keys()
    for module, (environment, mounts) in seen.items():
        config = configured(module, environment)
        assert not config.insecure
        keys = {"ticket_key", "api_keys"} if module == "router" else {"ticket_keys"}
        assert config.fleet_secret
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


def kubernetes_redis() -> tuple[list[str], int]:
    """The flags of Redis, and the memory that its container may have."""
    document = dict(manifests())["Deployment/redis"]
    (container,) = document["spec"]["template"]["spec"]["containers"]
    assert [volume["emptyDir"] for volume in document["spec"]["template"]["spec"]["volumes"]] == [{}]
    return container["args"][1:], parse_bytes(container["resources"]["limits"]["memory"] + "b")


def compose_redis() -> tuple[list[str], int]:
    """The flags of Redis where nothing is set, and no bound."""
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["redis"]
    assert "volumes" not in service
    return [shell_default(flag) for flag in service["command"][1:]], 1 << 40


def shell_default(text: str) -> str:
    """Text after Compose has filled in defaults, where no variable is set."""
    return re.sub(r"\$\{\w+:-(.*)\}", r"\1", text)


@pytest.mark.parametrize("redis", [kubernetes_redis, compose_redis])
@pytest.mark.parametrize("kind", BINARIES)
def test_redis_evicts_within_its_memory_and_keeps_nothing(redis: Any, kind: str, tmp_path: Path) -> None:
    flags, memory = redis()
    server = Server(kind, tmp_path, *flags)
    try:
        server.start()
        with server.client() as client:
            config = client.config_get("*")
    finally:
        server.kill()
    assert (config["maxmemory-policy"], config["save"], config["appendonly"]) == ("allkeys-lru", "", "no")
    assert 0 < int(config["maxmemory"]) <= 0.8 * memory
    assert config["lazyfree-lazy-eviction"] == config["lazyfree-lazy-expire"] == "yes"


@pytest.mark.parametrize("environments", [kubernetes_environments, compose_texts, secure_kubernetes, secure_compose])
def test_workers_of_both_roles_share_redis_and_all_share_the_secret(environments: Any) -> None:
    seen = {module: environment for module, environment, *_ in environments()}
    assert seen.keys() == CONFIGS.keys()
    assert {module: environment.get("BATON_REDIS") for module, environment in seen.items()} == {
        "router": None,
        "prefill_svc": "redis://redis:6379",
        "decode_svc": "redis://redis:6379",
    }
    secrets = {environment.get("BATON_FLEET_SECRET") for environment in seen.values()}
    assert len(secrets) == 1
    assert None not in secrets


def test_the_network_lets_both_roles_reach_redis() -> None:
    (rule,) = dict(manifests())["NetworkPolicy/redis"]["spec"]["ingress"]
    (peer,) = rule["from"]
    (term,) = peer["podSelector"]["matchExpressions"]
    assert (term["operator"], set(term["values"])) == ("In", {"prefill", "decode"})


KUSTOMIZE = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]


@pytest.mark.skipif(not shutil.which(KUSTOMIZE[0]), reason="neither kustomize nor kubectl is here")
def test_kustomize_makes_of_base_and_overlay_what_these_tests_take_them_for() -> None:
    done = subprocess.run([*KUSTOMIZE, str(SECURE)], capture_output=True, text=True, check=True, timeout=60)
    documents = yaml.safe_load_all(done.stdout)
    made = {f"{document['kind']}/{document['metadata']['name']}": document for document in documents}
    assert dict(manifests()).keys() <= made.keys()
    for expected in secure_deployments():
        (found,) = made[f"Deployment/{expected['metadata']['name']}"]["spec"]["template"]["spec"]["containers"]
        (container,) = expected["spec"]["template"]["spec"]["containers"]
        for part in ("env", "volumeMounts"):
            by_name = [{entry["name"]: entry for entry in entries} for entries in (found[part], container[part])]
            assert by_name[0] == by_name[1]
