"""What `baton up` says of settings before it starts anything."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from baton import cores
from baton.cli import up


@pytest.mark.parametrize(("redis", "warned"), [("redis://host", True), ("none", False), ("embedded", False)])
def test_a_lasting_redis_without_a_lasting_secret_is_warned_of(
    redis: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "run", lambda options: 0)
    result = CliRunner().invoke(up.up, [f"--redis={redis}"])
    assert ("warning: BATON_FLEET_SECRET is not set" in result.stderr) is warned
    assert not CliRunner().invoke(up.up, [f"--redis={redis}"], env={"BATON_FLEET_SECRET": "a"}).stderr


def test_more_threads_than_the_cores_can_bear_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "affinity", lambda: 4)
    monkeypatch.setattr(cores, "quota", lambda: 2.5)
    seen: list[up.UpOptions] = []
    monkeypatch.setattr(up, "run", lambda options: seen.append(options) or 0)
    results = [CliRunner().invoke(up.up, ["--redis=none", *flags]) for flags in ([], ["--threads=1"], ["--threads=2"])]
    assert [options.threads for options in seen] == [1, 1, 2]
    assert [result.stderr for result in results[:2]] == ["", ""]
    assert results[2].stderr.startswith("warning: --threads 2 for each of 2 workers, on 3 cores")
    refused = CliRunner().invoke(up.up, ["--redis=none", "--threads=5"])
    assert refused.exit_code == 2
    assert "'--threads': 5 are more than the 4 cores that this process may use" in refused.stderr
