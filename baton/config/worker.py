"""Settings of prefill and decode workers, and those that both share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from baton import bundled
from baton.config.options import Settings, option
from baton.config.values import parse_cpus
from baton.engine.config import KV_HOMES, EngineConfig
from baton.kv.prefix.redis.address import check_url
from baton.lifecycle import PREFILL_TOKEN_S
from baton.native import KERNELS
from baton.telemetry.logs import FORMATS, LEVELS

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHE_WRITES = ("first", "second", "never")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Settings):
    """Settings of one worker.

    Raises ConfigError naming the field and the value seen.
    """

    model: str = option("", help="Checkpoint directory or hub name; empty: the bundled one.")
    served_model_name: str = option("", help="Name of the served model; empty: the last part of the model.")
    device: str = option("auto", help="Device that runs the model; auto: cuda, or cpu without one.", choices=DEVICES)
    dtype: str = option("auto", help="Element type of weights and computation.", choices=DTYPES)
    kv_dtype: str = option("auto", help="Element type of the KV cache.", choices=DTYPES)
    kernels: str = option(
        "auto",
        help="Kernels on a CPU: native (Baton's own), torch (PyTorch's), or auto (native on CPUs with AVX2).",
        choices=KERNELS,
    )
    packed_weights: str = option(
        "",
        help="Path of a file, on a tmpfs, through which the workers of a host share the weights of native kernels; "
        "ranks add their number to it. Empty: no sharing.",
    )
    max_model_len: int = option(
        0, help="Largest number of tokens of prompt and output together; 0: the limit of the model.", minimum=0
    )
    kv_memory: int = option(0, help="Size of the KV pool; 0: automatic.", unit="bytes")
    kv_home: str = option(
        "auto",
        help="Memory that has the KV pages: device; host; or auto, which is the device, and host memory for sequences "
        "that do not fit on it.",
        choices=KV_HOMES,
    )
    host_memory: int = option(
        0,
        help="Host memory in addition to --kv-memory: for KV pages with --kv-home auto, otherwise for cached prefixes "
        "(not decode workers). 0: none. But with --kv-home auto on CUDA, if the device is too small for one sequence "
        "of --max-model-len, host memory holds its pages.",
        unit="bytes",
    )
    segment_tokens: int = option(
        0,
        help="Tokens of KV in host memory that attention reads at a time; 0: 16,384 on CUDA, 4,096 on CPU.",
        minimum=0,
        hidden=True,
    )
    num_kv_buffers: int = option(
        3, help="Device buffers for KV that comes from host memory, each for --segment-tokens.", minimum=2, hidden=True
    )
    page_size: int = option(
        0,
        help="Tokens in a page; 0: 256 on CUDA; on CPU 16, and more if --max-model-len is over 131,072.",
        minimum=0,
        hidden=True,
    )
    block_size: int = option(
        16, help="Tokens in a block of prefix hashing, the same in the whole fleet.", minimum=1, hidden=True
    )
    tensor_parallel: int = option(1, help="Processes that share each layer, on a CPU.", minimum=1)
    pipeline_parallel: int = option(1, help="Stages that share the layers, on a CPU.", minimum=1)
    threads: int = option(
        0,
        help="Compute threads of each process; 0: the cores, divided by the processes.",
        minimum=0,
    )
    cpus: str = option("", help="Cores that the worker uses, such as 0-3,8; empty: all that it may use.")
    control: str = option("127.0.0.1:0", help="Listener for routers; port 0: any free one.", unit="address")
    kv: str = option("127.0.0.1:0", help="Listener for KV transfers.", unit="address")
    ops: str = option("127.0.0.1:0", help="HTTP listener for live, ready and metrics.", unit="address")
    kv_advertise: str = option(
        "",
        help="Address of the kv listener for peers; empty: the port of --kv, at the host by which routers reach this "
        "worker.",
        unit="address",
    )
    worker_id: str = option("", help="Name of the worker; empty: role, host and a random part.")
    tls_cert: str = option("", help="PEM file with this worker's certificate; TLS needs cert, key and CA.")
    tls_key: str = option("", help="PEM file with the private key of --tls-cert.")
    tls_ca: str = option("", help="PEM file with the CA that signed the certificates of routers and peers.")
    ticket_keys: str = option("", help="PEM file with the routers' public keys; fetching KV then needs a ticket.")
    insecure: bool = option(False, help="Let other machines reach control and kv without TLS and ticket keys.")
    redis: str = option(
        "none",
        help="Prefix cache: redis://, rediss://, unix://, redis+cluster:// or redis+sentinel:// URL, or none.",
        shown=False,
    )
    fleet_secret: str = option(
        "", help="Secret that authenticates cached blocks, the same in all workers and routers.", secret=True
    )
    cache_budget_s: float = option(0.5, help="Seconds that a round trip to Redis may take.", minimum=0.001, hidden=True)
    cache_ttl_s: int = option(
        24 * 3600, help="Seconds for which Redis keeps a block that nobody uses.", minimum=1, hidden=True
    )
    cache_writes: str = option(
        "first", help="Write blocks to Redis when first seen, when seen a second time, or never.", choices=CACHE_WRITES
    )
    stall_s: float = option(
        10.0,
        help="Seconds without progress after which an engine with work counts as unhealthy.",
        minimum=0.01,
        hidden=True,
    )
    log_level: str = option("info", help="Lowest level that is logged.", choices=LEVELS)
    log_format: str = option("text", help="Form of log lines; json: an object on each line.", choices=FORMATS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.redis)
        parse_cpus(self.cpus)

    @property
    def checkpoint(self) -> str:
        """Checkpoint directory or hub name."""
        return self.model or str(bundled.path())

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        return self.served_model_name or self.checkpoint.rstrip("/").rpartition("/")[2]

    def engine_config(self) -> EngineConfig:
        """The settings of the engine, without slots."""
        from baton.engine.config import EngineConfig

        return EngineConfig(
            model=self.checkpoint,
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            kernels=self.kernels,
            packed_weights=self.packed_weights,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            kv_memory=self.kv_memory,
            kv_home=self.kv_home,
            host_memory=self.host_memory if self.kv_home == "auto" else 0,
            segment_tokens=self.segment_tokens,
            num_kv_buffers=self.num_kv_buffers,
            block_size=self.block_size,
            threads=self.threads,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            pin_threads=bool(self.cpus),
        )


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Settings of one prefill worker.

    Raises ConfigError naming the field and the value seen.
    """

    chunk_size: int = option(0, help="Tokens in a chunk; 0: chosen from prompt length and measured rate.", minimum=0)
    long_prompt_chunks: int = option(
        16,
        help="Number of chunks that makes a prompt long. The blocks of a long prompt go to Redis after each chunk, so "
        "that another worker can resume it; 0: no prompt is long.",
        minimum=0,
        hidden=True,
    )
    max_waiting: int = option(
        64, help="Largest number of prompts that wait for their first chunk.", minimum=1, hidden=True
    )
    lease_s: float = option(
        10.0, help="Seconds for which finished KV is kept if nobody fetches it.", minimum=0.01, hidden=True
    )
    drain_s: float = option(
        30.0, help="Seconds that running prompts and fetches of finished KV get in a drain.", minimum=0
    )

    @property
    def cache_memory(self) -> int:
        """Bytes of host memory for cached prefixes: --host-memory, unless the pool has it."""
        return 0 if self.kv_home == "auto" else self.host_memory

    def engine_config(self) -> EngineConfig:
        """The settings of the engine, which checks that there is memory for the cache too."""
        return replace(super().engine_config(), cache_memory=self.cache_memory)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of one decode worker.

    A decode worker reads cached prefixes from its own pages only, and writes new ones to Redis. Raises ConfigError
    naming the field and the value seen.
    """

    slots: int = option(32, help="Largest number of sequences in the generation batch.", minimum=1)
    reserve_tokens: int = option(
        256,
        help="Output tokens of a choice for which pages are reserved at first; longer outputs get more pages later.",
        minimum=1,
        hidden=True,
    )
    convert_kv: bool = option(
        False, help="Accept KV of another element type and convert it; converted KV is not cached."
    )
    start_timeout_s: float = option(
        10.0, help="Seconds for which pages are reserved for a request that has not started.", minimum=0.01, hidden=True
    )
    fetch_timeout_s: float = option(
        600.0,
        help="Longest time in seconds from the start of a request until all its KV has arrived, prefill included; each "
        "token of the context adds 0.1 s.",
        minimum=0.01,
        hidden=True,
    )
    fetch_silence_s: float = option(
        30.0,
        help="Seconds without a frame after which a KV transfer fails; prefill workers send a frame each second.",
        minimum=0.01,
        hidden=True,
    )
    drain_s: float = option(30.0, help="Seconds that running sequences get to finish in a drain.", minimum=0)

    def fetch_limit_s(self, context_tokens: int) -> float:
        """Longest time in seconds until the KV of a context has arrived; it grows with the context, as prefill does."""
        return self.fetch_timeout_s + PREFILL_TOKEN_S * context_tokens

    def engine_config(self) -> EngineConfig:
        """The settings of the engine."""
        return replace(super().engine_config(), slots=self.slots)


@dataclass(frozen=True, kw_only=True)
class MixedConfig(PrefillConfig, DecodeConfig):
    """Settings of one worker of both roles.

    It has one pool, so it converts no KV. Raises ConfigError naming the field and the value seen.
    """

    convert_kv: ClassVar[bool] = False  # type: ignore[misc]
    drain_s: float = option(30.0, help="Seconds that running requests get to finish in a drain.", minimum=0)
    itl_target_ms: float = option(
        0.0,
        help="Time between two tokens of a sequence, in milliseconds, that prompts may cause; 0: 3.5 times the time "
        "without prompts, or that of 8 prompt tokens for each sequence.",
        minimum=0,
    )
