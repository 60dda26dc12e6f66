"""Write docs/metrics.md from the list in baton/telemetry/metrics.py; --check only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton.telemetry.metrics import MAX_TENANTS, METRIC_FAMILIES, OTHER_TENANTS, MetricFamily

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

INTRODUCTION = f"""# Metrics

`scripts/metrics.py` writes this page from the list in `baton/telemetry/metrics.py`. Healthy values
and alerts are in [operations](operations.md#metrics-and-alerts).

Each process serves `/metrics` on its ops listener (`--ops`), with the families of its own role, and
`process_*`, `python_gc_*` and `python_info`. Names, units and label names are those of vLLM where
it has the metric, with the prefix `baton_`.

- A mixed worker exports the families of prefill and decode workers, with the label `role="mixed"`.
- All samples of the tables have the labels `model_name` and `role`, those of the process. Where a
  table lists `role`, it is the role of the workers that the number is about; a worker has only its
  own, and a mixed worker has both.
- `tenant` is the tenant's name in the key file, empty without keys. A process names the first
  {MAX_TENANTS} tenants that it serves, and counts the others as `{OTHER_TENANTS}`.
- Counters of one label exist from the start, at 0. There are no `_created` series.
- Times of requests are those of the latency account that clients get. They are recorded when a
  request succeeds, and the times to the first token and between tokens when tokens are sent. Queue,
  prefill, KV transfer, slot wait and decode add up to the end-to-end time.
"""


def row(family: MetricFamily) -> str:
    """The row of a family."""
    labels = [f"`{name}`" + (f": {', '.join(values)}" if values else "") for name, values in family.labels.items()]
    return f"| `{family.name}` | {family.kind} | {', '.join(family.roles)} | {'; '.join(labels)} | {family.help} |"


def page() -> str:
    """The whole page."""
    rows = [row(family) for family in METRIC_FAMILIES.values()]
    table = ["| name | kind | exported by | labels | meaning |", "|---|---|---|---|---|", *rows]
    buckets: dict[tuple[float, ...], list[str]] = {}
    for family in METRIC_FAMILIES.values():
        if family.buckets:
            buckets.setdefault(family.buckets, []).append(f"`{family.name}`")
    bounds = ["| histograms | bounds of buckets |", "|---|---|"]
    bounds += [
        f"| {', '.join(names)} | {' '.join(f'{each:,}' for each in sizes)} |" for sizes, names in buckets.items()
    ]
    return "\n".join([INTRODUCTION, *table, "", "## Buckets", "", *bounds, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        print(f"{PAGE} is not current: run python scripts/metrics.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
