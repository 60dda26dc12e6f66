"""Cores by affinity and by the quotas of cgroups, from files as the kernel has them."""

import os
from pathlib import Path

import pytest

from baton.config.values import parse_cpus
from baton.errors import ConfigError
from baton.process import cores


def system(root: Path, groups: str, **files: str) -> tuple[Path, Path]:
    """A kernel's files; names of groups' files have `__` for a slash and `_dot_` for a dot."""
    (root / "cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "mount" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root / "cgroup", root / "mount"


V1 = "4:cpu,cpuacct:/docker/ab\n3:cpuset:/other\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"cpu_dot_max": "150000 100000"}, 1.5),
        ("0::/\n", {"cpu_dot_max": "max 100000"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a__b__cpu_dot_max": "max 100000", "a__cpu_dot_max": "200000 100000"}, 2.0),
        ("0::/a/b\n", {"a__b__cpu_dot_max": "50000 100000", "a__cpu_dot_max": "200000 100000"}, 0.5),
        # The path of the host, seen from within a container.
        ("0::/host/path\n", {"cpu_dot_max": "300000 100000"}, 3.0),
        ("0::/\n", {"cpu_dot_max": "nonsense"}, None),
        (
            V1,
            {
                "cpu,cpuacct__docker__ab__cpu_dot_cfs_quota_us": "250000",
                "cpu,cpuacct__docker__ab__cpu_dot_cfs_period_us": "100000",
            },
            2.5,
        ),
        (V1, {"cpu,cpuacct__cpu_dot_cfs_quota_us": "-1", "cpu,cpuacct__cpu_dot_cfs_period_us": "100000"}, None),
    ],
)
def test_quotas_of_both_cgroups(groups: str, files: dict[str, str], limit: float | None, tmp_path: Path) -> None:
    assert cores.quota(*system(tmp_path, groups, **files)) == limit


def test_no_cgroups_are_no_limit(tmp_path: Path) -> None:
    assert cores.quota(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(("limit", "usable"), [(None, 8), (2.5, 3), (0.1, 1), (64.0, 8)])
def test_a_quota_limits_usable_cores(limit: float | None, usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "quota", lambda: limit)
    assert cores.usable() == usable


@pytest.mark.parametrize(("text", "cpus"), [("", set()), ("0", {0}), ("0-2,7", {0, 1, 2, 7}), ("3,3-3", {3})], ids=repr)
def test_core_lists_are_parsed(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "2-1", "1,,2", "1;2", " ", "0-99999999999"])
def test_invalid_core_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cpus: must be a list like 0-3,8, got"):
        parse_cpus(text)


def test_ranks_have_whole_cores_of_one_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Hardware threads 0 and 4, 1 and 5 and so on are one core; a socket has two cores.
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(cores, "_CPUS", tmp_path)
    assert [sorted(cores.share(rank, 2, 2, range(8))) for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [sorted(cores.share(rank, 4, 2, range(8))) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert cores.share(1, 3, 3, range(8)) == frozenset(range(8))


def test_shares_are_disjoint_and_have_enough_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_CPUS", tmp_path)
    shares = [cores.share(rank, 3, 2, range(8)) for rank in range(3)]
    assert [sorted(share) for share in shares] == [[0, 1], [2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize(("count", "threads"), [(2, 4), (3, 2), (16, 1)])
def test_threads_of_processes_that_compute_together(count: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable", lambda: 8)
    assert cores.threads_each(count) == threads
