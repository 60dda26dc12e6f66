"""The account of what the cache adds before the first token: differences of neighbours, and whose CPU counts."""

from __future__ import annotations

import os
import queue
import threading
import time

import pytest

from bench.prefix_account import LOOP, OTHERS, Ready, account, accounts, beside, busiest, thread_seconds
from bench.prefix_cold import COLD, NOT_SHOWN, OFF, ON, Cold


def cold(way: str, speed: float) -> Cold:
    # 20 ms of CPU beside the forward pass, and with the cache 3 ms more in prefill and 2 ms in Redis.
    more = way == ON
    apart = {LOOP: 0.015 + 0.003 * more, "router": 0.005, **({"redis": 0.002 * more} if way in (ON, OFF) else {})}
    return Cold(way, 5.0 * speed, {}, {}, apart)


def ready(rounds: int) -> list[Ready]:
    return [Ready(way, 0.004 if way == ON else 0.001) for way in COLD] * rounds


def test_the_account_is_wait_and_cpu_whatever_the_forward_pass_took() -> None:
    # The machine halves its speed within pairs: their ratios are 0.5 and 2.
    samples = [cold(way, speed) for _ in range(4) for way, speed in zip(COLD, (1, 2, 1, 2, 1, 2), strict=True)]
    found = accounts(samples, ready(4))
    assert set(found) == {"cold_on_over_no_cache", "cold_on_over_cache_off"}
    for each in found.values():
        assert each["wait_ms"] == {"median": 3.0, "interval": [3.0, 3.0], "pairs": 8}
        assert each["beside_computing_ms"]["median"] == 5.0
        assert each["beside_computing_ms"]["by_part"] == {LOOP: 3.0, "router": 0.0, "redis": 2.0}
        assert (each["account_ms"], each["interval_ms"]) == (8.0, [8.0, 8.0])
        assert each["account_share"] == pytest.approx(0.008 / 7.5, abs=1e-5)
        assert each["reached"] is True


def test_neither_a_dear_cache_nor_few_pairs_show_that_the_bar_is_met() -> None:
    samples = [cold(way, 0.1) for way in COLD] * 4
    assert account(samples, ready(4), OFF)["reached"] == NOT_SHOWN
    few = account(samples, ready(2), OFF)
    assert (few["account_ms"], few["interval_ms"], few["reached"]) == (8.0, None, NOT_SHOWN)


def test_compute_threads_do_not_count_and_new_threads_do() -> None:
    before, after = {7: 100.0, 8: 1.0, 9: 3.0}, {7: 100.1, 8: 3.0, 9: 5.5, 10: 0.25}
    compute = busiest(before, after, 2)
    assert compute == {8, 9}
    assert beside(7, compute, before, after) == pytest.approx({LOOP: 0.1, OTHERS: 0.25})


def test_the_time_of_a_thread_is_its_own() -> None:
    took, may_end = queue.Queue[float](), threading.Event()

    def busy() -> None:
        while time.thread_time() < 0.02:
            pass
        took.put(time.thread_time())
        may_end.wait()

    thread = threading.Thread(target=busy)
    before = thread_seconds(os.getpid())
    thread.start()
    own = took.get()
    while (after := thread_seconds(os.getpid())[thread.native_id or 0]) < own:
        pass  # it is on its way to sleep
    may_end.set()
    thread.join()
    assert thread.native_id not in before
    assert after == pytest.approx(own, abs=0.005)
