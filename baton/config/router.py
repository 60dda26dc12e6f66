"""Settings of a router."""

from __future__ import annotations

from dataclasses import dataclass

from baton import bundled
from baton.config.options import Settings, option
from baton.errors import ConfigError
from baton.telemetry.logs import LEVELS


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Settings):
    """Settings of one router.

    Raises ConfigError naming the field and the value seen.
    """

    prefill: tuple[str, ...] = option((), help="Prefill workers: HOST:PORT or dns:///NAME:PORT, with commas.")
    decode: tuple[str, ...] = option((), help="Decode workers: HOST:PORT or dns:///NAME:PORT, with commas.")
    grpc: str = option("127.0.0.1:0", help="HOST:PORT for clients; port 0: any free one.", unit="address")
    ops: str = option("127.0.0.1:0", help="HOST:PORT for live, ready and metrics over HTTP.", unit="address")
    processes: int = option(
        1, help="Routers, each a process, that share --grpc; they have --ops and the ports that follow.", minimum=1
    )
    model: str = option("", help="Checkpoint directory or hub name; empty: the bundled one.")
    served_model_name: str = option("", help="Name of the served model; empty: from --model.")
    max_model_len: int = option(0, help="Most tokens of prompt and output together; 0: the workers'.", minimum=0)
    line_capacity: int = option(1024, help="Requests that may wait for a worker.", minimum=1)
    line_wait_s: float = option(
        0.0, help="Seconds; a request that is expected to wait longer in the line is refused; 0: none is.", minimum=0
    )
    prefill_limit: int = option(
        4,
        help="Requests sent to one prefill worker at a time; up to twice as many while another tenant has more.",
        minimum=1,
    )
    max_attempts: int = option(3, help="Attempts at serving a request before its fault is reported.", minimum=1)
    reserve_timeout_s: float = option(5.0, help="Seconds for a decode worker's answer to a reservation.", minimum=0.01)
    request_timeout_s: float = option(3600.0, help="Deadline in seconds of requests that come without.", minimum=0.01)
    client_stall_s: float = option(
        60.0, help="Seconds without the client taking any of its waiting output; then its stream ends.", minimum=0.1
    )
    prefill_silence_s: float = option(
        10.0, help="Seconds without a word from a prefill call after which it has failed.", minimum=0.01
    )
    isolation_wait_s: float = option(
        30.0,
        help="Seconds in which workers must become free for a request that worker deaths point at; "
        "after that it runs among others.",
        minimum=0,
    )
    worker_wait_s: float = option(
        60.0, help="Seconds that requests wait when no worker of a role is there; 0: new ones are refused.", minimum=0
    )
    resolve_s: float = option(5.0, help="Seconds between two look-ups of a dns:/// name.", minimum=0.1)
    drain_s: float = option(30.0, help="Seconds that running requests have to finish at a drain.", minimum=0)
    tls_cert: str = option("", help="PEM file with this router's certificate; TLS needs cert, key and CA.")
    tls_key: str = option("", help="PEM file with the private key of --tls-cert.")
    tls_ca: str = option("", help="PEM file with the CA whose certificates workers must have.")
    client_certs: bool = option(False, help="Require a certificate of --tls-ca from clients, besides their keys.")
    ticket_key: str = option("", help="PEM file with the private key that signs tickets for KV.")
    api_keys: str = option("", help="File with the hashes of the clients' API keys; without it anybody may ask.")
    fleet_secret: str = option("", help="Keeps tenants apart in the prefix cache; the workers' own.", secret=True)
    insecure: bool = option(False, help="Allow --grpc beyond loopback without TLS and API keys.")
    log_level: str = option("info", help="Least level that is logged.", choices=LEVELS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefill", "decode"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: names no worker")
        if self.client_certs and not self.tls_ca:
            raise ConfigError("client_certs: needs tls_cert, tls_key and tls_ca")

    @property
    def checkpoint(self) -> str:
        """Checkpoint directory or hub name."""
        return self.model or str(bundled.path())

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        return self.served_model_name or self.checkpoint.rstrip("/").rsplit("/", 1)[-1]
