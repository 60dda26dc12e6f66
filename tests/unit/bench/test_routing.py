"""Simulated placement: each run has the workers of its own fleet."""

from __future__ import annotations

from baton.bench.traces import Arrival
from bench import routing


def test_simple_policies_use_every_worker_of_their_own_fleet() -> None:
    """One run after the other: what is told of a large fleet must not be that of a small one before it."""
    for workers in (2, 8) * 20:
        arrivals = [Arrival(float(at), 16, 1, (at,)) for at in range(200)]
        for policy in ("round-robin", "random"):
            place, affinity = routing.POLICIES[policy]
            router = routing.Router(16, place, affinity=affinity)
            simulation = routing.Simulation(workers, 16, 16.0, [router], seed=1)
            simulation.run(arrivals)
            assert all(worker.busy_s for worker in simulation.prefills.values()), (policy, workers)
