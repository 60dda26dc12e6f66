"""One environment serves all roles: every role's fields are known to the others."""

from __future__ import annotations

import dataclasses

import pytest

from baton.config import ROLE_FIELDS, load
from baton.errors import ConfigError
from decode_svc.config import DecodeConfig
from prefill_svc.config import PrefillConfig
from router.config import RouterConfig

ROLES = (PrefillConfig, DecodeConfig, RouterConfig)


def test_the_shared_set_is_the_union_of_all_fields() -> None:
    assert {field.name for role in ROLES for field in dataclasses.fields(role)} == ROLE_FIELDS


@pytest.mark.parametrize("role", ROLES)
def test_each_role_takes_the_whole_environment(role: type) -> None:
    environ = {
        "BATON_PREFILL": "prefill:1",
        "BATON_DECODE": "decode:1,decode:2",
        "BATON_CHUNK_SIZE": "16",
        "BATON_SLOTS": "8",
        "BATON_LINE_CAPACITY": "5",
        "BATON_KV_MEMORY": "64MiB",
        "BATON_FLEET_SECRET": "s",
        "BATON_LOG_LEVEL": "debug",
    }
    config = load(role, "role", [], environ)
    assert config.log_level == "debug"


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_help_for_every_flag(role: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(role, "role", ["--help"], {})
    lines = capsys.readouterr().out.splitlines()
    flags = [index for index, line in enumerate(lines) if "BATON_" in line and not line.startswith("      ")]
    assert len(flags) == len(dataclasses.fields(role))
    assert all(lines[index + 1].strip() for index in flags)


WORKERS = ["--prefill=127.0.0.1:1", "--decode=127.0.0.1:1"]


@pytest.mark.parametrize(
    ("role", "flags", "environ", "words"),
    [
        (PrefillConfig, ["--chunk-size", "-3"], {}, ["--chunk-size", "-3"]),
        (PrefillConfig, ["--fleet-secret", "x"], {}, ["--fleet-secret", "BATON_FLEET_SECRET"]),
        (PrefillConfig, [], {"BATON_CHUNKSIZE": "3"}, ["BATON_CHUNKSIZE"]),
        (DecodeConfig, ["--slots", "0"], {}, ["--slots", "'0'"]),
        (DecodeConfig, ["--chunk-size", "5"], {}, ["--chunk-size"]),
        (DecodeConfig, [], {"BATON_SLOT": "3"}, ["BATON_SLOT"]),
        (RouterConfig, ["--decode=127.0.0.1:1"], {}, ["--prefill: names no worker"]),
        (RouterConfig, [*WORKERS, "--line-capacity=0"], {}, ["--line-capacity: must be at least 1, got '0'"]),
        (RouterConfig, [*WORKERS, "--processes=0"], {}, ["--processes: must be at least 1, got '0'"]),
        (RouterConfig, [*WORKERS, "--colour=red"], {}, ["--colour: unknown flag"]),
    ],
)
def test_bad_settings_are_named(role: type, flags: list[str], environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(role, "role", flags, environ)
    assert all(word in str(refused.value) for word in words)
