"""Flags and variables become the settings of a role, or an error that names what is wrong."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from baton.config.options import flag_of
from baton.config.roles import ROLES, command, load
from baton.config.router import RouterConfig
from baton.config.worker import DecodeConfig, PrefillConfig, WorkerConfig
from baton.errors import ConfigError

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
WORKERS = ["--prefill=p:1", "--decode=d:1"]


def test_defaults_flags_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(DecodeConfig, []) == DecodeConfig()
    flags = ["--model=m", "--kv-memory", "1.5GiB", "--slots=7", "--stall-s", "2.5", "--kv-advertise=h:1"]
    expected = DecodeConfig(model="m", kv_memory=3 << 29, slots=7, stall_s=2.5, kv_advertise="h:1")
    assert load(DecodeConfig, flags) == expected
    monkeypatch.setenv("BATON_SLOTS", "")
    monkeypatch.setenv("BATON_LOG_LEVEL", "")
    assert load(DecodeConfig, []) == DecodeConfig(), "an empty variable counts as not set"
    monkeypatch.setenv("BATON_SLOTS", "9")
    monkeypatch.setenv("BATON_CONVERT_KV", "yes")
    monkeypatch.setenv("BATON_FLEET_SECRET", "s")
    assert load(DecodeConfig, []) == DecodeConfig(slots=9, convert_kv=True, fleet_secret="s")
    assert load(DecodeConfig, ["--slots=4"]).slots == 4
    assert load(RouterConfig, ["--prefill", "p:1, p:2", "--decode=d:1"]).prefill == ("p:1", "p:2")


@pytest.mark.parametrize(("home", "pool", "cache"), [("auto", 7, 0), ("device", 0, 7), ("host", 0, 7)])
def test_host_memory_is_for_the_pool_or_for_cached_prefixes(home: str, pool: int, cache: int) -> None:
    config = load(PrefillConfig, ["--model=m", f"--kv-home={home}", "--host-memory=7"])
    engine = config.engine_config()
    assert (engine.host_memory, engine.cache_memory, config.cache_memory) == (pool, cache, cache)


def test_booleans_with_and_without_value() -> None:
    said = [["--insecure"], ["--insecure", "--model=m"], ["--insecure", "true"], ["--insecure=false"], []]
    assert [load(PrefillConfig, flags).insecure for flags in said] == [True, True, True, False, False]


@pytest.mark.parametrize("role", ROLES)
def test_one_environment_serves_all_roles(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "PREFILL": "p:1",
        "DECODE": "d:1",
        "CHUNK_SIZE": "16",
        "SLOTS": "8",
        "QUEUE_CAPACITY": "5",
        "API_KEY": "k",
        "KERNELS": "torch",
    }
    for name, value in (own | {"LOG_LEVEL": "debug"}).items():
        monkeypatch.setenv(f"BATON_{name}", value)
    config: Any = load(ROLES[role], [])
    assert config.log_level == "debug"


@pytest.mark.parametrize(
    ("role", "flags", "variables", "words"),
    [
        ("prefill", ["--chunk-size", "-3"], {}, ["--chunk-size", "-3"]),
        ("prefill", ["--kv-memory", "4 parsecs"], {}, ["--kv-memory", "'4 parsecs'"]),
        ("prefill", ["--lease-s", "nan"], {}, ["--lease-s", "'nan'"]),
        ("prefill", ["--device=tpu"], {}, ["--device", "'auto', 'cpu'", "'tpu'"]),
        ("prefill", ["--kernels=cuda"], {}, ["--kernels", "'auto', 'native', 'torch'", "'cuda'"]),
        ("decode", [], {"BATON_KERNELS": "onednn"}, ["BATON_KERNELS", "'auto', 'native', 'torch'", "'onednn'"]),
        ("prefill", ["--control=nohost"], {}, ["--control", "HOST:PORT", "'nohost'"]),
        ("prefill", ["--kv-advertise=h:70000"], {}, ["--kv-advertise", "'h:70000'"]),
        ("prefill", ["--redis=http://u:hush@h"], {}, ["--redis", "http://h"]),
        ("prefill", ["--fleet-secret", "hush"], {}, ["--fleet-secret", "set BATON_FLEET_SECRET"]),
        ("prefill", ["--fleet-secret=hush"], {}, ["--fleet-secret", "set BATON_FLEET_SECRET"]),
        ("prefill", ["--model=a", "--insecure", "--model", "b"], {}, ["--model is given 2 times"]),
        ("prefill", ["--model"], {}, ["--model", "requires"]),
        ("prefill", ["stray"], {}, ["stray"]),
        ("prefill", [], {"BATON_CPUS": "one"}, ["BATON_CPUS", "'one'"]),
        ("prefill", [], {"BATON_CHUNKSIZE": "3"}, ["BATON_CHUNKSIZE: unknown variable"]),
        ("decode", ["--slots", "many"], {}, ["--slots", "'many'", "integer"]),
        ("decode", ["--chunk-size", "5"], {}, ["--chunk-size"]),
        ("decode", [], {"BATON_SLOTS": "0"}, ["BATON_SLOTS", "0"]),
        ("decode", [], {"BATON_slots": "3"}, ["BATON_slots: unknown variable"]),
        ("router", ["--decode=d:1"], {}, ["--prefill", "no worker that prefills is named", "--mixed"]),
        ("router", ["--prefill=p:1"], {}, ["--decode", "no worker that decodes is named", "--mixed"]),
        ("router", [*WORKERS, "--client-certs"], {}, ["--client-certs", "needs tls_cert"]),
        ("router", [*WORKERS, "--colour=red"], {}, ["--colour"]),
    ],
)
def test_wrong_settings_are_named(role: str, flags: list[str], variables: dict[str, str], words: list[str]) -> None:
    found = CliRunner().invoke(command(ROLES[role], role, pytest.fail), flags, env=variables)
    assert found.exit_code == 2
    assert all(word in found.stderr for word in words), found.stderr
    assert "hush" not in found.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (lambda: DecodeConfig(slots=0), "slots: 0 is not"),
        (lambda: DecodeConfig(slots=2.5), "slots: must be of type int, got 2.5"),
        (lambda: PrefillConfig(stall_s=float("inf")), "stall_s: inf"),
        (lambda: PrefillConfig(kv_memory=-1), "kv_memory: must be a size .*'-1'"),
        (lambda: RouterConfig(prefill=("p:1",), decode=("d:1",), grpc="here"), "grpc: .*'here'"),
        (lambda: RouterConfig(prefill=("p:1",)), "decode: no worker that decodes is named"),
        (lambda: RouterConfig(prefill=["p:1"]), r"prefill: must be of type tuple, got \['p:1'\]"),
        (lambda: RouterConfig(prefill=(1,)), r"prefill: must be texts, got \(1,\)"),
    ],
)
def test_settings_that_code_makes_are_checked_too(settings: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings()


@pytest.mark.parametrize("role", ROLES)
def test_a_setting_is_in_the_help_or_in_the_list_of_hidden_ones_and_secrets_are_in_neither(role: str) -> None:
    environ = {"BATON_FLEET_SECRET": "hush", "BATON_REDIS": "redis://user:hush@h"}
    found = CliRunner().invoke(command(ROLES[role], role, pytest.fail), ["--help"], env=environ)
    assert found.exit_code == 0
    assert "BATON_FLEET_SECRET" in found.stdout
    assert len(found.stdout.splitlines()) <= 100
    listed = OPERATIONS.read_text()
    for field in fields(ROLES[role]):
        name, metadata = flag_of(field.name), field.metadata
        shown = not (metadata["secret"] or metadata["hidden"])
        assert (f"{name} " in found.stdout) == shown, name
        assert (f"| `{name}` |" in listed) == metadata["hidden"], name
    assert "hush" not in found.stdout


def test_the_help_shows_at_most_fifty_settings() -> None:
    shown = {field.name for settings in ROLES.values() for field in fields(settings) if not field.metadata["hidden"]}
    assert len(shown) <= 50


def test_repr_shows_no_secret() -> None:
    assert "hush" not in repr(DecodeConfig(fleet_secret="hush", redis="redis://user:hush@h"))


def test_the_engine_gets_its_share_of_the_settings() -> None:
    config = WorkerConfig(model="/m", dtype="float32", kernels="torch", kv_memory=123, page_size=32, threads=2)
    engine = config.engine_config()
    assert (engine.model, engine.dtype, engine.kernels, engine.kv_memory) == ("/m", "float32", "torch", 123)
    assert (engine.page_size, engine.threads, engine.slots) == (32, 2, 0)


def test_the_model_is_named_after_its_directory_unless_a_name_is_set() -> None:
    assert WorkerConfig(model="/models/llama/").model_name == "llama"
    assert WorkerConfig(model="/models/llama", served_model_name="x").model_name == "x"
    assert Path(WorkerConfig().checkpoint).name == "bundled"
