"""The Compose files hold: every variable belongs to the service that gets it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config import parse_bytes
from baton.process.service import STOP_S
from tests.deployment import CONFIGS, configured
from tests.redis_server import BINARIES, Server

DEPLOY = Path(__file__).parents[2] / "deploy"
VERSION = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
IMAGE = f"localhost/baton:{VERSION}"

TOKENIZER_BYTES = 570 << 20
"""Memory of a process that tokenizes texts of megabytes; a router starts up to four."""
ROUTER_BYTES = 1 << 30
"""Memory of a router without them."""


def secure_compose() -> Iterator[tuple[str, dict[str, str], set[str]]]:
    """Module, environment and mounted files of each of our services."""
    base = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    secure = yaml.safe_load((DEPLOY / "compose.secure.yaml").read_text())
    for name, service in secure["services"].items():
        environment = base[name]["environment"] | service["environment"]
        merged = {key: str(value) for key, value in environment.items() if key.startswith("BATON_")}
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
            texts = {name: str(value) for name, value in service["environment"].items()}
            assert texts.pop("HF_TOKEN") == "${HF_TOKEN:-}", "the hub's own variable"
            yield service["command"][-1], texts


def test_services_understand_their_environment() -> None:
    seen = dict(compose_environments())
    assert seen.keys() == CONFIGS.keys()
    for module, environment in seen.items():
        assert configured(module, environment).insecure


def test_compose_passes_cores_and_processes_on() -> None:
    texts = dict(compose_texts())
    assert texts["router"]["BATON_PROCESSES"] == "${BATON_PROCESSES:-1}"
    cores = [texts[f"{role}_svc"]["BATON_CPUS"] for role in ("prefill", "decode", "mixed")]
    assert cores == ["${PREFILL_CPUS:-}", "${DECODE_CPUS:-}", "${MIXED_CPUS:-}"]
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


def compose_services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_one_service_builds_the_image_and_nobody_pulls_it() -> None:
    ours = {name: service for name, service in compose_services().items() if service["image"] == IMAGE}
    assert ours.keys() == {"router", "prefill", "decode", "mixed"}
    assert [name for name, service in ours.items() if "build" in service] == ["router"]
    assert {name: service["profiles"] for name, service in ours.items() if "profiles" in service} == {
        "mixed": ["mixed"]
    }
    assert {service["pull_policy"] for service in ours.values()} == {"never"}


@pytest.mark.parametrize("name", compose_services())
def test_containers_start_again_have_no_rights_and_pinned_images(name: str) -> None:
    service = compose_services()[name]
    assert service["restart"] == "unless-stopped"
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.search(r":v?\d+\.\d+", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_containers_are_stopped_after_the_drain_and_the_stop() -> None:
    for module, environment in compose_texts():
        defaults = {name: shell_default(text) for name, text in environment.items()}
        service = compose_services()[module.removesuffix("_svc")]
        grace_s = float(shell_default(service["stop_grace_period"]).removesuffix("s"))
        assert grace_s >= configured(module, defaults).drain_s + STOP_S


def test_the_router_has_memory_for_its_tokenizers() -> None:
    assert parse_bytes(shell_default(compose_services()["router"]["mem_limit"])) >= ROUTER_BYTES + 4 * TOKENIZER_BYTES


def test_monitoring_is_provisioned_from_files_that_exist() -> None:
    services = compose_services()
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["monitoring"]
    for service in ("prometheus", "grafana"):
        for volume in services[service]["volumes"]:
            source, *_ = volume.split(":")
            assert not source.startswith(".") or (DEPLOY / source).is_dir(), source
    scrape = yaml.safe_load((DEPLOY / "monitoring/prometheus.yaml").read_text())["scrape_configs"]
    looked_up = {job["job_name"]: job["dns_sd_configs"][0]["names"] for job in scrape}
    assert looked_up == {f"baton-{role}": [role] for role in ("router", "prefill", "decode", "mixed")}


def test_flash_attn_is_built_after_torch_and_not_in_isolation() -> None:
    """Its setup.py imports torch, which pip's isolated builds do not have."""
    dockerfile, root = (DEPLOY / "Dockerfile").read_text(), DEPLOY.parent
    commands = re.findall(r"pip install(?:[^\n]*\\\n)*[^\n]*", dockerfile)
    assert ["--no-build-isolation" in each for each in commands if "'cuda'" in each] == [True]
    assert dockerfile.index("-r requirements.txt") < dockerfile.index("'cuda'")
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        for command in re.findall(r"pip\s+install[^`]*\[[^]`]*cuda", page.read_text()):
            assert "--no-build-isolation" in command, page
    assert (root / "README.md").read_text().count(".[cuda]") == 1


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
def test_workers_of_all_roles_share_redis_and_all_share_the_secret(environments: Any) -> None:
    seen = {module: environment for module, environment, *_ in environments()}
    assert seen.keys() == CONFIGS.keys()
    assert {module: environment.get("BATON_REDIS") for module, environment in seen.items()} == {
        "router": None,
        "prefill_svc": "redis://redis:6379",
        "decode_svc": "redis://redis:6379",
        "mixed_svc": "redis://redis:6379",
    }
    secrets = {environment.get("BATON_FLEET_SECRET") for environment in seen.values()}
    assert len(secrets) == 1
    assert None not in secrets
