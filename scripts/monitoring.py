"""Evaluate all queries of deploy/monitoring in a Prometheus that has scraped a fleet under load.

    python scripts/monitoring.py http://127.0.0.1:9090

For each panel and each alert it prints the number of series, and the value if there is one. Of an alert it evaluates
the value that is compared with the threshold. Without data are series that begin with the first event: faults,
refusals, failed attempts. The exit status is 1 if Prometheus refuses a query.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).resolve().parents[1] / "deploy" / "monitoring"
RATE_INTERVAL = "1m"
"""Stand-in for $__rate_interval, which Grafana sets to at least four scrape intervals."""


def queries() -> Iterator[tuple[str, str]]:
    """The place and the expression of each query, with all values for variables."""
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                text = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
                yield f"{path.stem}: {panel['title']} {target.get('legendFormat', '')}", re.sub(r"\$\w+", ".*", text)
    for group in yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], re.sub(r"\s*(?:==|>|<)\s*[\d.]+$", "", rule["expr"])


def evaluate(server: str, query: str) -> list[Any]:
    """The series of an instant query. Raises ValueError if Prometheus refuses it."""
    url = f"{server}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]) from None


def main(server: str) -> int:
    """Print all results; the exit status."""
    refused = 0
    for place, query in queries():
        try:
            found = evaluate(server, query)
        except ValueError as error:
            refused += 1
            print(f"refused  {place}: {error}")
        else:
            values = ", ".join(each["value"][1][:8] for each in found[:4])
            print(f"{len(found) or 'no data':>7}  {place}  {values}")
    return min(refused, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/")))
