"""The list of metrics: what a process exports, its page, and the queries of dashboards and alerts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.kv.format import KvFormat, KvPart
from baton.lifecycle import Lifecycle, State
from baton.rates import UNKNOWN_PREFILL_RATE
from baton.telemetry import metrics
from baton.telemetry.metrics import MAX_TENANTS, METRIC_FAMILIES, OTHER_TENANTS, Exposition, tenant_label
from router.gauges import queued_seconds
from router.placement.policy import DecodeView, FleetView, PrefillView
from router.placement.queue import PlacementRequest
from scripts.metrics import PAGE, page

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = MONITORING / "rules.yaml"
DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python scripts/metrics.py"


def test_a_worker_speaks_of_its_own_role() -> None:
    metrics.QUEUED_SECONDS.labels("prefill").set(2)
    assert exported("prefill", "baton_queued_seconds") == ['{model_name="m",role="prefill"} 2.0']
    assert len(exported("router", "baton_queued_seconds")) == 2
    assert not exported("decode", "baton_prefill_tokens_total")
    assert 'fingerprint="f",max_model_len="9"' in exported("decode", "baton_model_info")[0]


def test_a_mixed_worker_speaks_of_both_roles() -> None:
    metrics.QUEUED_SECONDS.labels("prefill").set(2)
    metrics.QUEUED_SECONDS.labels("decode").set(3)
    assert exported("mixed", "baton_queued_seconds") == [
        '{model_name="m",role="prefill"} 2.0',
        '{model_name="m",role="decode"} 3.0',
    ]
    assert 'role="mixed"' in exported("mixed", "baton_slots")[0]
    families = [line.split()[2] for line in lines("mixed") if line.startswith("# TYPE baton_")]
    expected = (name for name, family in METRIC_FAMILIES.items() if {"prefill", "decode"} & set(family.roles))
    assert sorted(families) == sorted(expected)


def exported(role: str, name: str) -> list[str]:
    return [line.removeprefix(name) for line in lines(role) if line.startswith(f"{name}{{")]


def lines(role: str) -> list[str]:
    exposition = Exposition(role, "m", model=lambda: {"fingerprint": "f", "max_model_len": 9})
    exposition.refresh()
    return exposition.text().decode().splitlines()


def test_tenants_beyond_a_number_share_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_tenants", set())
    names = [tenant_label(f"t{number}") for number in range(MAX_TENANTS + 2)]
    assert names == [*(f"t{number}" for number in range(MAX_TENANTS)), OTHER_TENANTS, OTHER_TENANTS]
    assert tenant_label("t0") == "t0"


KV = KvFormat((KvPart("k", "float32", (2, 4)),), layers=2, block_size=16)


def waiting(tokens: int) -> PlacementRequest:
    return PlacementRequest("r", 0, "", Lifecycle(State.QUEUED, 0.0), tokens, 8, (0,), is_retry=False)


@pytest.mark.parametrize(
    ("rate", "decodes", "refused", "expected"),
    [
        (200.0, 1, False, (1.5, 0.0)),
        (0.0, 1, False, (300 / UNKNOWN_PREFILL_RATE, 0.0)),
        (200.0, 1, True, (0.0, 2 * 12.0 / 4)),
        (200.0, 0, False, (0.0, 2 * 12.0 / 4)),
    ],
)
def test_queued_work_is_that_of_the_role_for_which_the_queue_waits(
    rate: float, decodes: int, refused: bool, expected: tuple[float, float]
) -> None:
    fleet = FleetView([PrefillView("p", KV, rate=rate)], [DecodeView("d", KV)] * decodes)
    requests = [waiting(100), waiting(200)]
    assert queued_seconds(requests, fleet, waits_for_decode=refused, batch=4.0, decode_s=12.0) == expected


# Dashboards and alerts.

Rule = dict[str, Any]


def rules() -> list[Rule]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}", target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{path.stem}: ${variable['name']}", variable["query"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


SCRAPED = {name: {"job", "instance"} for name in ("up", "process_resident_memory_bytes", "process_cpu_seconds_total")}
"""Series that Prometheus or its client makes."""
TARGET = {"job", "instance", "namespace", "pod", "le"}
FUNCTIONS = {
    *("rate", "increase", "sum", "max", "min", "avg", "count", "by", "histogram_quantile", "clamp_min", "label_values"),
    *("on", "group_left", "and", "or", "unless", "absent", "time"),
}
SERIES = re.compile(r"\b([a-zA-Z_]\w*)\b(?:\{([^}]*)\})?")


def problems(query: str) -> list[str]:
    """Names of series and labels that do not exist, and values that a label never has."""
    names = {name: family for family in METRIC_FAMILIES.values() for name in family.sample_names}
    found, labels_of = [], set[str](TARGET)
    grouped = [
        label for each in re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", query) for label in each.split(",")
    ]
    bare = re.sub(r"\b(?:by|on|group_left)\s*\([^)]*\)|\[[^\]]*\]|\$\w+", "", query)
    if query.startswith("label_values("):
        bare, _, label = bare.removesuffix(")").rpartition(",")
        grouped.append(label)
    for name, matchers in SERIES.findall(re.sub(r"(?<=\d)(e\d+|[smhd])\b", "", bare)):
        if name in FUNCTIONS:
            continue
        if name not in names and name not in SCRAPED:
            found.append(name)
            continue
        own = set(names[name].all_labels) if name in names else SCRAPED[name]
        labels_of |= own
        for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
            values = names[name].labels.get(label) if name in names else ()
            if label not in own | TARGET:
                found.append(f"{name}{{{label}}}")
            elif (values and value and not set(value.split("|")) <= set(values)) or (
                label == "le" and float(value) not in names[name].buckets
            ):
                found.append(f'{name}{{{label}="{value}"}}')
    return found + [f"by {label.strip()}" for label in grouped if label.strip() and label.strip() not in labels_of]


@pytest.mark.parametrize(("place", "query"), list(queries()), ids=lambda each: re.sub(r"\W+", "-", each)[:40])
def test_a_query_names_metrics_and_labels_of_the_list(place: str, query: str) -> None:
    assert query.count("(") == query.count(")"), place
    assert not problems(query), place


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("rate(baton_replay_total[5m])", ["baton_replay_total"]),
        ('baton_slots{state="busy"}', ['baton_slots{state="busy"}']),
        ('baton_slots{tier="pool"}', ["baton_slots{tier}"]),
        ('baton_decode_step_seconds_bucket{le="3"}', ['baton_decode_step_seconds_bucket{le="3"}']),
        ("sum by (tier) (baton_slots)", ["by tier"]),
        ("rate(baton_time_to_first_token_seconds[5m])", ["baton_time_to_first_token_seconds"]),
        ("label_values(baton_build_info, pods)", ["by pods"]),
    ],
)
def test_the_check_of_queries_finds_mistakes(query: str, wrong: list[str]) -> None:
    assert problems(query) == wrong


def test_operations_explains_each_alert() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    explained = set(re.findall(r"^\| `(Baton\w+)` \|", text, re.MULTILINE))
    assert explained == {rule["alert"] for rule in rules()}
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "runbook"}, rule["alert"]
