"""Every metric that Baton exports, in one list.

    declared here ── moved by the call sites ── `Exposition` ──▶ /metrics of one process, for the families of its role

Names, units and buckets are those of the field (vLLM, SGLang, Prometheus), with the prefix `baton_`: base units, and
`_total` for counters. `docs/metrics.md` is made of this list (`scripts/metrics.py`).

Labels are few and bounded. Each sample also has `model_name` and `role`, those of the process, unless its family has a
label `role` of its own. A tenant is a label of counters alone, and by its name for the first MAX_TENANTS tenants.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import prometheus_client
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

ROUTER, PREFILL, DECODE, MIXED = "router", "prefill", "decode", "mixed"
WORKERS = (PREFILL, DECODE)
"""Roles of families and of labels; a mixed worker has both."""
ROLES = (ROUTER, *WORKERS)

MAX_TENANTS = 100
OTHER_TENANTS = "(others)"
"""Label of all tenants after the first MAX_TENANTS."""

PROCESS_LABELS = ("model_name", "role")
"""Labels of the process, which each sample has."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600, 1200)
"""Up to 20 minutes, the time to the first token of a prompt of a million tokens."""

ITL_SECONDS = (
    *(0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.055, 0.06, 0.07),
    *(0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30),
)
"""Steps of 5 ms around 50 ms, a usual limit."""

STEP_SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5) if digit * 10**power <= 2_000_000)


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric as exported.

    `kind` is counter, gauge or histogram. `labels` has the possible values of each label, or nothing if they are open.
    """

    name: str
    kind: str
    help: str
    roles: tuple[str, ...]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Its own labels and those of the process, without `le`."""
        return tuple(dict.fromkeys((*self.labels, *PROCESS_LABELS)))


METRIC_FAMILIES: dict[str, MetricFamily] = {}
"""All families by name, in the order of the documentation."""

_METRICS: dict[str, MetricWrapperBase] = {}

M = TypeVar("M", bound=MetricWrapperBase)
Roles = str | Iterable[str]
Labels = Mapping[str, Sequence[str]]


def _declare(kind: str, name: str, help: str, roles: Roles, labels: Labels, buckets: tuple[float, ...] = ()) -> None:
    roles = (roles,) if isinstance(roles, str) else tuple(roles)
    METRIC_FAMILIES[name] = MetricFamily(name, kind, help, roles, labels, buckets)


def _kept(name: str, metric: M) -> M:
    _METRICS[name] = metric
    values = list(METRIC_FAMILIES[name].labels.values())
    if len(values) == 1:
        # A counter must be there at 0, or Prometheus does not see its first increase.
        for value in values[0]:
            metric.labels(value)
    return metric


def _counter(name: str, help: str, roles: Roles, **labels: Sequence[str]) -> Counter:
    _declare("counter", name, help, roles, labels)
    return _kept(name, Counter(name, help, tuple(labels)))


def _gauge(name: str, help: str, roles: Roles, **labels: Sequence[str]) -> Gauge:
    _declare("gauge", name, help, roles, labels)
    return _kept(name, Gauge(name, help, tuple(labels)))


def _histogram(name: str, help: str, roles: Roles, buckets: tuple[float, ...]) -> Histogram:
    _declare("histogram", name, help, roles, {}, buckets)
    return _kept(name, Histogram(name, help, buckets=buckets))


# Requests, as clients see them.

REQUESTS = _counter("baton_requests_total", "Requests that ended, by gRPC status.", ROUTER, tenant=(), status=())
FINISHED = _counter(
    "baton_request_success_total",
    "Choices that ended, by the reason of their end.",
    ROUTER,
    finished_reason=("stop", "length"),
)
REFUSED = _counter(
    "baton_requests_refused_total",
    "Requests refused before a worker served them, by reason; calls of Tokenize count too if a limit refused them.",
    ROUTER,
    tenant=(),
    reason=(
        "queue_full",
        "queue_wait",
        "deadline",
        "max_streams",
        "tokenizer_queue",
        "workers_full",
        "unavailable",
        "draining",
        "unauthenticated",
        "invalid_argument",
        "not_found",
    ),
)
PROMPT_TOKENS = _counter("baton_prompt_tokens_total", "Tokens of prompts that were prefilled.", ROUTER, tenant=())
GENERATION_TOKENS = _counter("baton_generation_tokens_total", "Tokens sent to clients.", ROUTER, tenant=())
CLIENTS_STALLED = _counter("baton_clients_stalled_total", "Streams ended because their client did not read.", ROUTER)

E2E = _histogram(
    "baton_e2e_request_latency_seconds",
    "From arrival to the last token of a request that succeeded.",
    ROUTER,
    (*SECONDS, 3600),
)
TTFT = _histogram("baton_time_to_first_token_seconds", "From arrival to the first token.", ROUTER, SECONDS)
ITL = _histogram("baton_inter_token_latency_seconds", "Time between two tokens of a choice.", ROUTER, ITL_SECONDS)
QUEUE_TIME = _histogram(
    "baton_request_queue_time_seconds",
    "From arrival until workers were found, tokenization included; of requests that succeeded, like the next four.",
    ROUTER,
    SECONDS,
)
PREFILL_TIME = _histogram(
    "baton_request_prefill_time_seconds", "From the call of prefill to the first token.", ROUTER, SECONDS
)
TRANSFER_TIME = _histogram(
    "baton_request_kv_transfer_time_seconds",
    "From the first token until decode has all KV; the transfer before is hidden behind prefill.",
    ROUTER,
    SECONDS,
)
SLOT_WAIT_TIME = _histogram(
    "baton_request_slot_wait_time_seconds", "From then on until decode has a free slot.", ROUTER, SECONDS
)
DECODE_TIME = _histogram(
    "baton_request_decode_time_seconds", "From then on to the last token.", ROUTER, (*SECONDS, 3600)
)
REQUEST_PROMPT_TOKENS = _histogram(
    "baton_request_prompt_tokens", "Tokens of the prompt of a request that succeeded.", ROUTER, TOKENS
)
REQUEST_GENERATION_TOKENS = _histogram(
    "baton_request_generation_tokens", "Generated tokens of all its choices.", ROUTER, TOKENS
)

# Load, for autoscaling.

RUNNING = _gauge(
    "baton_requests_running",
    "Router: attempts that workers serve. Prefill: prompts that are computed. Decode: sequences in the batch. "
    "Mixed: the sum of both.",
    ROLES,
)
WAITING = _gauge(
    "baton_requests_waiting",
    "Router: requests in the queue. Prefill: prompts before their first chunk. Decode: reservations and sequences "
    "that wait. Mixed: the sum of both.",
    ROLES,
)
QUEUED_SECONDS = _gauge(
    "baton_queued_seconds",
    "Work that waits for workers of a role, in seconds of one worker. The sum over the fleet counts no work twice.",
    ROLES,
    role=WORKERS,
)
SLOTS = _gauge("baton_slots", "Slots of the generation batch, by state.", DECODE, state=("used", "free"))
PAGES = _gauge("baton_pages", "Pages of the KV pool, by state.", WORKERS, state=("used", "free", "cached"))
KV_USAGE = _gauge("baton_kv_cache_usage_perc", "Part of the pages that requests use; 1 is all.", WORKERS)
FLEET = _gauge(
    "baton_workers", "Workers that the router can use, by what they do: mixed ones count twice.", ROUTER, role=WORKERS
)

# Failures and migrations.

ATTEMPTS_FAILED = _counter("baton_attempts_failed_total", "Attempts that failed, by reason.", ROUTER, reason=())
REPLAYS = _counter(
    "baton_replays_total",
    "Migrations: attempts that repeat a failed one elsewhere, by the cause of the failure.",
    ROUTER,
    cause=("fault", "lost", "drain", "preempted", "refused"),
)
RETRIES_REFUSED = _counter(
    "baton_retries_refused_total", "Failures that were not retried because the retry budget was empty.", ROUTER
)
BREAKERS_OPEN = _gauge(
    "baton_breakers_open", "Circuit breakers that are open, by what they protect.", ROUTER, guards=("worker", "pair")
)
WASTED_PREFILL_TOKENS = _counter(
    "baton_wasted_prefill_tokens_total", "Tokens prefilled for an attempt that failed.", (ROUTER, PREFILL)
)
SEQUENCES_PREEMPTED = _counter(
    "baton_sequences_preempted_total", "Sequences given back to the router because no page was left.", DECODE
)

# Work of the engines.

PREFILL_TOKENS = _counter(
    "baton_prefill_tokens_total",
    "Prompt tokens, by where their KV came from.",
    PREFILL,
    source=("computed", "pool", "host", "redis", "peer"),
)
DECODE_TOKENS = _counter("baton_decode_tokens_total", "Tokens generated by decode steps.", DECODE)
STEP_SECONDS = _histogram("baton_decode_step_seconds", "Duration of a decode step.", DECODE, STEP_SECONDS_BUCKETS)
BATCH_SIZE = _histogram(
    "baton_decode_batch_size", "Sequences in a decode step.", DECODE, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
RANK_WAIT_SECONDS = _counter(
    "baton_rank_wait_seconds_total",
    "Time that the leader of a worker has waited for its other ranks in passes; 0 without ranks.",
    WORKERS,
)

# Transfer of KV.

TRANSFER_BYTES = _counter(
    "baton_transfer_bytes_total", "KV bytes moved, by direction.", WORKERS, direction=("sent", "received")
)
TRANSFER_FAULTS = _counter(
    "baton_transfer_faults_total",
    "Faults detected in transfers, by kind.",
    WORKERS,
    kind=(
        "timeout",
        "bad_frame",
        "corrupt_frame",
        "incomplete_transfer",
        "wrong_prefix",
        "stale_incarnation",
        "ticket_refused",
        "source_unreachable",
        "transfer_error",
    ),
)
EXPORTS_OPEN = _gauge("baton_exports_open", "KV exports that wait for another worker to fetch them.", WORKERS)
LEASES_EXPIRED = _counter(
    "baton_leases_expired_total", "Exports freed because nobody fetched or renewed them.", WORKERS
)

# Prefix cache.

INDEX_BLOCKS = _gauge(
    "baton_index_blocks", "Prefix blocks that the router knows of, by role of the holder.", ROUTER, role=WORKERS
)
PLACEMENTS = _counter(
    "baton_placements_total",
    "Placements of attempts: on one worker that prefills and decodes, on two, or on one that prefills only.",
    ROUTER,
    kind=("in_place", "transfer", "prefill_only"),
)
PLACED_TOKENS = _counter(
    "baton_placed_prefix_tokens_total",
    "Prompt tokens that the router expected to be cached at prefill, and that were cached.",
    ROUTER,
    kind=("expected", "found"),
)
PREFIX_BLOCKS = _counter(
    "baton_prefix_blocks_total",
    "Prefix-cache blocks, by tier and outcome.",
    WORKERS,
    tier=("pool", "host", "redis", "any"),
    outcome=("hit", "miss", "fetched", "written", "evicted", "dropped"),
)
PREFIX_FAULTS = _counter(
    "baton_prefix_faults_total",
    "Prefix-cache faults, each a miss, by reason.",
    WORKERS,
    reason=(
        *("timeout", "connection", "loading", "auth", "readonly", "oom", "cluster_down", "moved", "busy"),
        *("wrong_type", "truncated", "corrupt", "forged", "foreign", "version", "kv_format", "misplaced"),
        *("evicted", "server"),
    ),
)
PREFIX_DECISIONS = _counter(
    "baton_prefix_decisions_total",
    "Decisions how much of a cached prefix to fetch into the pages.",
    PREFILL,
    decision=("nothing", "none", "part", "all", "trial"),
)
REUSED_TOKENS = _counter(
    "baton_decode_reused_tokens_total", "Context tokens whose KV decode already had and did not fetch.", DECODE
)
UNSHARED_TOKENS = _counter(
    "baton_decode_unshared_tokens_total",
    "Context tokens whose KV was converted on the way, and is not shared with later prompts.",
    DECODE,
)
PREFIX_EXPORTS = _counter(
    "baton_decode_prefix_exports_total", "Pinned prefixes opened for prefill workers to fetch.", DECODE
)

# Facts of a process; `Exposition` makes them.

_declare("gauge", "baton_build_info", "Always 1; the version of Baton.", ROLES, {"version": (), "python": ()})
_declare(
    "gauge",
    "baton_model_info",
    "Always 1; the served model. A router has a fingerprint only once a worker is there; workers have degrees.",
    ROLES,
    {"fingerprint": (), "max_model_len": (), "tensor_parallel": (), "pipeline_parallel": ()},
)

_tenants: set[str] = set()


def tenant_label(tenant: str) -> str:
    """The label of a tenant: its name, or OTHER_TENANTS if this process has named MAX_TENANTS before it."""
    if tenant not in _tenants:
        if len(_tenants) >= MAX_TENANTS:
            return OTHER_TENANTS
        _tenants.add(tenant)
    return tenant


def set_kv_usage(*, used: int, free: int, cached: int) -> None:
    """Set the gauges of a worker's pages."""
    for state, pages in (("used", used), ("free", free), ("cached", cached)):
        PAGES.labels(state).set(pages)
    KV_USAGE.set(used / max(used + free + cached, 1))


class Exposition:
    """The metrics of one process: the families of its role, and those of the process itself.

    A mixed worker exports the families of prefill and decode workers, each family once.

    A scrape calls `refresh` on the event loop, which sets gauges by the function `measure` and asks `model` for the
    values of `baton_model_info`; then `text`, on any thread, because it takes up to 50 ms. A worker sets both functions
    when its model is loaded.
    """

    def __init__(
        self,
        role: str,
        model_name: str,
        *,
        measure: Callable[[], None] = lambda: None,
        model: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self._roles = frozenset(WORKERS if role == MIXED else (role,))
        self._labels = {"model_name": model_name, "role": role}
        families = METRIC_FAMILIES
        self._metrics = [metric for name, metric in _METRICS.items() if self._roles.intersection(families[name].roles)]
        self.measure = measure
        self.model = model
        self._model_info: Mapping[str, object] = {}

    def refresh(self) -> None:
        """Set all that is not counted where it arises."""
        self.measure()
        self._model_info = self.model()

    def text(self) -> bytes:
        """All samples in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of this role; each sample gets the labels of the process."""
        yield self._fact("baton_build_info", {"version": _version(), "python": platform.python_version()})
        yield self._fact("baton_model_info", self._model_info)
        for metric in itertools.chain.from_iterable(each.collect() for each in self._metrics):
            metric.samples = [
                each._replace(labels=self._labels | each.labels)
                for each in metric.samples
                # A worker speaks of its own roles alone.
                if ROUTER in self._roles or "role" not in each.labels or each.labels["role"] in self._roles
            ]
            yield metric
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            yield from collector.collect()

    def _fact(self, name: str, values: Mapping[str, object]) -> Metric:
        family = METRIC_FAMILIES[name]
        metric = Metric(name, family.help, family.kind)
        labels = {label: str(values.get(label, "")) for label in family.labels}
        metric.samples = [Sample(name, self._labels | labels, 1.0)]
        return metric


def _version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "unknown"
