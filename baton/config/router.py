"""Settings of a router."""

from __future__ import annotations

from dataclasses import dataclass

from baton import bundled
from baton.config.options import Settings, flag_of, option
from baton.errors import ConfigError
from baton.telemetry.logs import FORMATS, LEVELS


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Settings):
    """Settings of one router.

    Raises ConfigError naming the field and the value seen.
    """

    prefill: tuple[str, ...] = option((), help="Prefill workers: HOST:PORT or dns:///NAME:PORT, separated by commas.")
    decode: tuple[str, ...] = option((), help="Decode workers: HOST:PORT or dns:///NAME:PORT, separated by commas.")
    mixed: tuple[str, ...] = option(
        (), help="Workers of both roles: HOST:PORT or dns:///NAME:PORT, separated by commas."
    )
    grpc: str = option("127.0.0.1:0", help="HOST:PORT for clients; port 0: any free one.", unit="address")
    http: str = option(
        "",
        help="HOST:PORT for clients of OpenAI's HTTP API; port 0: any free one; empty: none.",
        unit="address",
    )
    http_origins: tuple[str, ...] = option(
        (), help="Origins whose pages may call --http from a browser, separated by commas; *: all.", hidden=True
    )
    ops: str = option("127.0.0.1:0", help="HOST:PORT for live, ready and metrics over HTTP.", unit="address")
    processes: int = option(
        1,
        help="Number of router processes that share --grpc and --http; they use the port of --ops and the ports after "
        "it.",
        minimum=1,
    )
    model: str = option("", help="Checkpoint directory or hub name; empty: the bundled one.")
    served_model_name: str = option("", help="Name of the served model; empty: the last part of --model.")
    generation_config: str = option(
        "auto",
        help="Defaults of sampling parameters; auto: those in the model's generation_config.json, if there are any; "
        "none: Baton's.",
        choices=("auto", "none"),
    )
    max_model_len: int = option(
        0, help="Largest number of tokens of prompt and output together; 0: the limit of the workers.", minimum=0
    )
    queue_capacity: int = option(
        1024,
        help="Requests that may wait for a worker, divided evenly among the tenants that have waiting requests; "
        "also the limit of a tenant's requests that wait to be tokenized.",
        minimum=1,
    )
    queue_wait_s: float = option(
        0.0,
        help="Longest expected wait in the queue, in seconds; a request with a longer one is refused. 0: no limit.",
        minimum=0,
    )
    prefill_limit: int = option(
        4,
        help="Requests sent to one prefill worker at a time; twice as many for a tenant with less than its share.",
        minimum=1,
        hidden=True,
    )
    max_attempts: int = option(
        3, help="Attempts at serving a request before its failure is reported.", minimum=1, hidden=True
    )
    reserve_timeout_s: float = option(
        5.0, help="Seconds within which a decode worker must answer a reservation.", minimum=0.01, hidden=True
    )
    request_timeout_s: float = option(
        3600.0, help="Seconds until the deadline of a request that has none.", minimum=0.01
    )
    client_stall_s: float = option(
        60.0,
        help="Seconds after which a stream ends if its client reads none of the waiting output.",
        minimum=0.1,
        hidden=True,
    )
    prefill_silence_s: float = option(
        10.0, help="Seconds without a message after which a prefill call has failed.", minimum=0.01, hidden=True
    )
    isolation_wait_s: float = option(
        30.0,
        help="Seconds that a request suspected of killing workers waits for free workers; "
        "after that it runs together with other requests.",
        minimum=0,
        hidden=True,
    )
    worker_wait_s: float = option(
        60.0, help="Seconds that requests wait while a role has no worker; 0: refuse new requests.", minimum=0
    )
    resolve_s: float = option(5.0, help="Seconds between two look-ups of a dns:/// name.", minimum=0.1, hidden=True)
    drain_delay_s: float = option(
        0.0,
        help="Seconds from SIGTERM in which the router still accepts requests, though it reports that it isn't ready.",
        minimum=0,
        hidden=True,
    )
    drain_s: float = option(30.0, help="Seconds that running requests get to finish in a drain.", minimum=0)
    connection_age_s: float = option(
        0.0,
        help="Seconds, give or take a tenth, after which clients connect again for new requests, so that they find "
        "other routers behind the same address. Running requests keep their connection. 0: never.",
        minimum=0,
    )
    tls_cert: str = option("", help="PEM file with this router's certificate; TLS needs cert, key and CA.")
    tls_key: str = option("", help="PEM file with the private key of --tls-cert.")
    tls_ca: str = option("", help="PEM file with the CA that signed the certificates of workers.")
    client_certs: bool = option(
        False, help="Require a certificate of --tls-ca from clients, in addition to their keys."
    )
    ticket_key: str = option("", help="PEM file with the private key that signs tickets for KV.")
    api_keys: str = option("", help="File with the hashes of the clients' API keys; without it, no key is needed.")
    fleet_secret: str = option(
        "", help="Secret that separates tenants in the prefix cache; the workers need the same one.", secret=True
    )
    insecure: bool = option(False, help="Let other machines reach --grpc and --http without TLS and API keys.")
    log_level: str = option("info", help="Lowest level that is logged.", choices=LEVELS)
    log_format: str = option("text", help="Form of log lines; json: an object on each line.", choices=FORMATS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, does in (("prefill", "prefills"), ("decode", "decodes")):
            if not (getattr(self, name) or self.mixed):
                flags = f"{flag_of(name)} or --mixed"
                raise ConfigError(f"{name}: no worker that {does} is named: {flags} must name at least one")
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
