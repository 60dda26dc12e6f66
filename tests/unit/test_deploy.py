"""The Compose files hold: every variable belongs to the service that gets it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment import CONFIGS, configured
from tests.redis_server import BINARIES, Server

DEPLOY = Path(__file__).parents[2] / "deploy"


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
        if service["image"].startswith("localhost/baton:"):
            yield service["command"][-1], {name: str(value) for name, value in service["environment"].items()}


def test_services_understand_their_environment() -> None:
    seen = dict(compose_environments())
    assert seen.keys() == CONFIGS.keys()
    for module, environment in seen.items():
        assert configured(module, environment).insecure


def test_compose_passes_cores_and_processes_on() -> None:
    texts = dict(compose_texts())
    assert texts["router"]["BATON_PROCESSES"] == "${BATON_PROCESSES:-1}"
    cores = [texts[f"{role}_svc"]["BATON_CPUS"] for role in ("prefill", "decode")]
    assert cores == ["${PREFILL_CPUS:-}", "${DECODE_CPUS:-}"]
    for module, environment in texts.items():
        configured(module, {name: shell_default(text) for name, text in environment.items()})


def test_secure_services_have_their_files_and_are_not_insecure() -> None:
    seen = {module: rest for module, *rest in secure_compose()}
    assert seen.keys() == CONFIGS.keys()
    for module, (environment, mounts) in seen.items():
        config = configured(module, environment)
        assert not config.insecure
        keys = {"ticket_key", "api_keys"} if module == "router" else {"ticket_keys"}
        assert config.fleet_secret
        for name in {"tls_cert", "tls_key", "tls_ca", *keys}:
            path = Path(getattr(config, name))
            assert str(path) in mounts, f"{module} has no {name}"


def shell_default(text: str) -> str:
    """Text after Compose has filled in defaults, where no variable is set."""
    return re.sub(r"\$\{\w+:-(.*)\}", r"\1", text)


@pytest.mark.parametrize("kind", BINARIES)
def test_redis_evicts_within_its_memory_and_keeps_nothing(kind: str, tmp_path: Path) -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["redis"]
    assert "volumes" not in service
    server = Server(kind, tmp_path, *(shell_default(flag) for flag in service["command"][1:]))
    try:
        server.start()
        with server.client() as client:
            config = client.config_get("*")
    finally:
        server.kill()
    assert (config["maxmemory-policy"], config["save"], config["appendonly"]) == ("allkeys-lru", "", "no")
    assert int(config["maxmemory"]) > 0
    assert config["lazyfree-lazy-eviction"] == config["lazyfree-lazy-expire"] == "yes"


@pytest.mark.parametrize("environments", [compose_texts, secure_compose])
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
