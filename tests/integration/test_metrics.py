"""The metrics of a router, a prefill and a decode worker: each family of a role is exported, and moves."""

import asyncio
import urllib.request
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import InvalidRequest
from baton.telemetry.metrics import DECODE, METRIC_FAMILIES, PREFILL, ROLES, ROUTER
from decode_svc.messages import FailureKind
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import Fleet, serving

WAIT_S = 120.0
TESTS = Path(__file__).parents[1]
CONSTANT = {"baton_build_info", "baton_model_info"}
MOVED_ELSEWHERE = {
    "baton_clients_stalled_total": "integration/test_slow_clients.py",
    "baton_retries_refused_total": "integration/test_router_faults.py",
    "baton_breakers_open": "integration/test_router_faults.py",
    "baton_wasted_prefill_tokens_total": "integration/test_prefill_ends.py",
    "baton_rank_wait_seconds_total": "unit/engine/test_ranks.py",
    "baton_sequences_preempted_total": "integration/test_decode_svc.py",
    "baton_transfer_faults_total": "integration/test_fleet.py",
    "baton_exports_open": "integration/test_transfer.py",
    "baton_leases_expired_total": "unit/transfer/test_leases.py",
    "baton_prefix_faults_total": "integration/test_prefix_faults.py",
    "baton_decode_unshared_tokens_total": "integration/test_fleet.py",
    "baton_decode_prefix_exports_total": "integration/test_decode_kv.py",
}
"""Families that a fault or a special setting moves, and the tests that do so."""

Samples = dict[tuple[str, ...], float]
Scrape = dict[str, dict[str, Samples]]
"""Samples of families, by role."""


async def scrape(addresses: dict[str, str]) -> Scrape:
    def read(address: str) -> dict[str, Samples]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
            text = answer.read().decode()
        assert "_created" not in text
        found: dict[str, Samples] = {}
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            samples = found.setdefault(name, {})
            for sample in family.samples:
                if name in METRIC_FAMILIES:
                    assert sample.name in METRIC_FAMILIES[name].sample_names
                    assert set(sample.labels) - {"le"} == set(METRIC_FAMILIES[name].all_labels), sample
                    assert sample.labels["model_name"] == "m"
                samples[sample.name, *sorted(sample.labels.values())] = sample.value
        return found

    return {role: await asyncio.to_thread(read, address) for role, address in addresses.items()}


def moved(before: Scrape, after: Scrape) -> set[str]:
    return {name for role in after for name, samples in after[role].items() if samples != before[role].get(name, {})}


async def test_each_family_is_exported_by_its_roles_and_moves(tmp_path: Path) -> None:
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32") as fleet, asyncio.timeout(WAIT_S):
        prefill = await fleet.prefill(kv_home="device", host_memory=16 << 20)
        decode = await fleet.decode(slots=1)
        router = await fleet.start_router([prefill], [decode])
        await serving(router.address)
        client = await fleet.client(router)
        ops = {ROUTER: router.ops_address, PREFILL: prefill.addresses.ops, DECODE: decode.addresses.ops}
        before = await scrape(ops)
        seen: set[str] = set()

        async def until(told: Callable[[Scrape], bool]) -> None:
            """Scrape until this holds, and note which families have moved."""
            while True:
                now = await scrape(ops)
                seen.update(moved(before, now))
                if told(now):
                    return
                await asyncio.sleep(0.01)

        for _ in range(2):
            await client.complete(prompt_ids(90), max_tokens=8, **greedy)
        with pytest.raises(InvalidRequest, match="999999"):
            await client.complete([5, 999_999], **greedy)
        # One of two choices has the only slot; the other one and the next request wait for it at the worker.
        async with aclosing(client.generate(prompt_ids(90), n=2, **greedy)) as stream:
            await anext(stream)
            queued = asyncio.create_task(client.complete(prompt_ids(50), max_tokens=4, **greedy))
            await until(lambda now: value(now[ROUTER], "baton_requests_waiting") == 1)
            await until(lambda now: value(now[DECODE], "baton_requests_waiting") == 2)
            decode.worker.fail_all(FailureKind.DRAINING, "for a test")
            await until(lambda now: value(now[ROUTER], "baton_replays_total", "drain") > 0)
        await queued
        await until(lambda now: value(now[ROUTER], "baton_requests_total", "CANCELLED") > 0)
        decode.status.drain()
        await until(lambda now: value(now[ROUTER], "baton_workers", "decode") == 0)
    for role in ROLES:
        exported = {name for name in before[role] if name.startswith("baton_")}
        assert exported == {name for name, family in METRIC_FAMILIES.items() if role in family.roles}
    assert seen >= METRIC_FAMILIES.keys() - CONSTANT - MOVED_ELSEWHERE.keys()


def value(families: dict[str, Samples], name: str, *labels: str) -> float:
    """The sum of the samples with these labels."""
    return sum(number for key, number in families[name].items() if set(labels) <= set(key))


@pytest.mark.parametrize("name", MOVED_ELSEWHERE)
def test_another_test_looks_at_a_family_that_a_fault_moves(name: str) -> None:
    text = (TESTS / MOVED_ELSEWHERE[name]).read_text()
    assert name in text or any(f"{constant}" in text for constant in _constants(name))


def _constants(name: str) -> list[str]:
    from baton.telemetry import metrics

    full = {name, name.removesuffix("_total")}
    return [each for each, value in vars(metrics).items() if getattr(value, "_name", None) in full]
