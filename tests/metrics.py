"""Values of this process's metrics."""

from typing import Any

from prometheus_client import REGISTRY


def count(metric: Any, *labels: str) -> float:
    """The value of a counter or gauge, of one with labels for these values."""
    (found,) = (metric.labels(*labels) if labels else metric).collect()
    return float(next(sample.value for sample in found.samples if not sample.name.endswith("_created")))


def sample(name: str, **labels: str) -> float:
    """The value of a counter or gauge by its name; 0 if nothing has been counted with these labels."""
    return REGISTRY.get_sample_value(name, labels) or 0.0
