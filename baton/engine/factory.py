"""Construction of an engine from an EngineConfig."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from baton.engine import host_memory, huge_pages
from baton.engine.config import EngineConfig, default_page_size, default_segment_tokens
from baton.engine.contract import EngineSpec, min_overlap_chunk
from baton.engine.core import EngineCore
from baton.engine.executor import InProcessExecutor
from baton.engine.kv_memory import KvShard, ShardedMemory, TorchMemory
from baton.engine.load import LoadedModel, RankPlace, load_model
from baton.engine.model_runner import ModelRunner
from baton.engine.process import pin_compute_threads
from baton.engine.ranks import ExchangeFiles, Ranks, RanksExecutor, StartRank, start_rank_process
from baton.errors import ConfigError
from baton.kv.format import KvFormat, attention_parts
from baton.model.attention import KvCache, SegmentRing, SegmentSource, SegmentViews
from baton.model.checkpoint import resolve
from baton.model.config import ModelConfig
from baton.model.decoder import stages_of
from baton.model.layers import unsplittable
from baton.model.tensors import DTYPES, dtype_name
from baton.model.zeros import RegistrationError, SharedMemory
from baton.native.collective import Channel, Collective, channel_memory, exchange_floats, shared_memory
from baton.native.decoder import NativeDecoder, unsupported
from baton.native.library import Kernels, NativeUnavailable, select_kernels
from baton.native.library import load as load_library
from baton.process import allocator, cores
from baton.process.load_progress import LoadProgress

_log = logging.getLogger(__name__)

_HOST_FRACTION, _DEVICE_FRACTION = 0.15, 0.85
"""Part of free memory that an automatic pool takes. A host runs several workers and other programs; a device runs one
worker, whose activations need the rest."""

_WAITING_SEQUENCES = 8
"""Number of sequences beside those in slots: transfers that wait for a slot, and exports that are not fetched yet."""

_SQUARE = 8192
"""Rows and columns of the measured product."""

_COPY_BYTES = 1 << 26
"""Size of the measured copy; torch keeps the pinned memory for later copies."""

_REPEATS = 5


def build(
    config: EngineConfig,
    steps_ahead: int | None = None,
    progress: LoadProgress | None = None,
    start_rank: StartRank = start_rank_process,
) -> EngineCore:
    """Load the model and allocate the pool; takes seconds to minutes, so not on an event loop.

    `steps_ahead` is that of the spec; by default 1 on CUDA, and 0 on a CPU, where `launch` computes the step.
    `progress` is that of the load. `start_rank` starts the process of a rank; the calling thread must live as long
    as the engine then. Raises ConfigError with a field that does not fit the machine or the model, ModelError for the
    checkpoint.
    """
    progress = progress or LoadProgress()
    began = time.monotonic()
    with ExitStack() as stack:
        ranks = place = None
        if config.ranks > 1:
            buffer_floats = _check_ranks(config)
            # Counted here, because a rank may use its own part of the cores only.
            config = replace(config, threads=config.threads or cores.threads_each(config.ranks))
            try:
                files = _exchange_files(config, buffer_floats)
                ranks = Ranks(config, buffer_floats, files, start_rank)
            except (OSError, AttributeError) as error:
                # Such as a kernel or a sandbox without memfd_create or pidfd_open.
                raise ConfigError(f"{config.ranks} ranks can't be started: {error}") from error
            stack.callback(ranks.close)
            progress.check = ranks.check
            places = [place_of(config, rank, each, buffer_floats) for rank, each in enumerate(files)]
            ranks.attach([exchange for each in places for exchange in each.exchanges])
            place = places[0]
        model = load(config, progress, place)
        if ranks is not None:
            ranks.wait_loaded(progress)
        progress.begin("making the KV pool")
        engine = assemble(model, config, steps_ahead, ranks)
        stack.pop_all()
    _log_loaded(model, engine.spec, time.monotonic() - began)
    return engine


def load(config: EngineConfig, progress: LoadProgress, place: RankPlace | None = None) -> LoadedModel:
    """Load the model, or with `place` the shard of its rank. Errors as in `build`."""
    path = resolve(config.model)
    model_config = ModelConfig.from_pretrained(path)
    device = _device(config.device)
    kernels = kernels_for(config.kernels, device)
    # Checked before loading, which takes long.
    _max_model_len(config.max_model_len, model_config.max_position_embeddings)
    dtype = DTYPES[config.dtype] if config.dtype != "auto" else _auto_dtype(model_config.dtype, device)
    kv_dtype = dtype if config.kv_dtype == "auto" else DTYPES[config.kv_dtype]
    kernels = kernels.unless(unsupported(model_config, dtype, kv_dtype), config.kernels)
    _log.info("kernels: %s", kernels)
    if config.threads:
        torch.set_num_threads(config.threads)
    _check_free_memory("kv_memory", config.kv_memory, _home(config, device))
    model = load_model(
        path,
        dtype=dtype,
        device=device,
        native=kernels.library,
        packed_weights=_packed_weights(config, place),
        progress=progress,
        place=place,
    )
    # Loading used more memory than the weights, which is not needed again.
    allocator.trim()
    if device.type == "cpu":
        # Done before the pool is made, which gets its huge pages in the background.
        huge_pages.collapse()
    if config.pin_threads:
        pin_compute_threads()
    return model


def _packed_weights(config: EngineConfig, place: RankPlace | None) -> str:
    """Path of the file with the packed weights of a rank."""
    if place is None:
        return config.packed_weights
    paths = config.packed_weights.split(",")
    if len(paths) > 1:
        return paths[place.rank]
    if not paths[0]:
        return ""
    return f"{paths[0]}.rank-{place.tp_rank}-of-{config.tensor_parallel}.stage-{place.pp_rank}-of-{place.pp_size}"


def assemble(
    model: LoadedModel, config: EngineConfig, steps_ahead: int | None = None, ranks: Ranks | None = None
) -> EngineCore:
    """Make an engine over a loaded model, with its pool; arguments and errors as in `build`.

    `ranks` has the other ranks, if `model` is the shard of one.
    """
    device = model.device
    max_model_len = _max_model_len(config.max_model_len, model.config.max_position_embeddings)
    kv_dtype = model.dtype if config.kv_dtype == "auto" else DTYPES[config.kv_dtype]
    kv_format = _kv_format(model, kv_dtype, config.block_size)
    page_size = config.page_size or default_page_size(device.type, max_model_len)
    heads = len(model.parallel.kv_heads(kv_format.heads)) * model.parallel.size
    page_bytes = kv_format.token_bytes * page_size * heads // kv_format.heads
    pages = _pages(config, page_bytes, page_size, max_model_len, _home(config, device))
    host_pages = _host_pages(config, page_bytes, pages, -(-max_model_len // page_size), device)
    device_pages = 0 if config.kv_home == "host" else pages
    spec = EngineSpec(
        fingerprint=model.fingerprint,
        kv_format=kv_format,
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(model.config.eos_token_ids),
        page_size=page_size,
        pages=device_pages + host_pages,
        slots=config.slots,
        steps_ahead=int(device.type == "cuda") if steps_ahead is None else steps_ahead,
        host_pages=host_pages,
        min_overlap_chunk=_min_overlap_chunk(model, kv_dtype, device) if host_pages else 0,
    )
    kv = make_kv_cache(config, model, spec)
    runner = make_runner(config, model, kv, spec)
    if ranks is None:
        return EngineCore(spec, InProcessExecutor(runner))
    stages = stages_of(model.config.num_layers, config.pipeline_parallel)
    shards = []
    for number in range(config.ranks):
        stage, rank = divmod(number, config.tensor_parallel)
        own = replace(model, layers=stages[stage], parallel=replace(model.parallel, rank=rank))
        cache = (
            make_kv_cache(config, own, spec, SharedMemory(ranks.kv_files[number - 1], commits=False)) if number else kv
        )
        shards.append(KvShard(TorchMemory(cache), own.layers, own.parallel.kv_heads(kv_format.heads)))
    ranks.share_pages(spec)
    return EngineCore(spec, RanksExecutor(runner, ShardedMemory(shards), ranks, stages))


def make_kv_cache(
    config: EngineConfig, model: LoadedModel, spec: EngineSpec, shared: SharedMemory | None = None
) -> KvCache:
    """Pages of one rank, of the layers and KV heads of `model`; in `shared`, if it is given."""
    # On CUDA there is one more page: rows of a graph without a sequence write to it.
    device_pages = spec.device_pages + int(model.device.type == "cuda")
    dtype = DTYPES[spec.kv_format.parts[0].dtype]
    try:
        return model.new_kv_cache(device_pages, spec.page_size, dtype, spec.host_pages, shared)
    except RegistrationError as error:
        name = "kv_memory" if config.kv_home == "host" else "host_memory"
        given = getattr(config, name) or "automatic"
        raise ConfigError(f"{name}: {given}: {error}") from error


def make_runner(config: EngineConfig, model: LoadedModel, kv: KvCache, spec: EngineSpec) -> ModelRunner:
    """The runner of one rank."""
    return ModelRunner(model, kv, spec, _source(config, model, kv, spec))


def place_of(config: EngineConfig, rank: int, files: ExchangeFiles, buffer_floats: int) -> RankPlace:
    """The place of a rank, with its exchanges over the memory in `files`."""
    stage, own = divmod(rank, config.tensor_parallel)
    collective = (
        Collective(files.collective, own, config.tensor_parallel, buffer_floats) if files.collective >= 0 else None
    )
    receive, send = (Channel(file, 4 * buffer_floats) if file >= 0 else None for file in (files.receive, files.send))
    return RankPlace(rank, own, stage, config.pipeline_parallel, collective, receive, send)


def _exchange_files(config: EngineConfig, buffer_floats: int) -> list[ExchangeFiles]:
    """Memory for the exchanges of all ranks: collectives of each stage, and channels between ranks of stages."""
    tp, stages = config.tensor_parallel, config.pipeline_parallel
    collectives = [shared_memory(tp, buffer_floats) if tp > 1 else -1 for _ in range(stages)]
    channels = [channel_memory(4 * buffer_floats) for _ in range((stages - 1) * tp)]
    none = [-1] * tp
    return [
        ExchangeFiles(collectives[rank // tp], receive, send)
        for rank, (receive, send) in enumerate(zip(none + channels, channels + none, strict=True))
    ]


def _check_ranks(config: EngineConfig) -> int:
    """Check that the model can be split over the ranks, and return the size of the buffers of their exchanges.

    Raises ConfigError, which names the degrees that would do.
    """
    device, size = _device(config.device), config.ranks
    name = "tensor_parallel" if config.tensor_parallel > 1 else "pipeline_parallel"
    if device.type != "cpu":
        raise ConfigError(f"{name}: {size} ranks run on a CPU, the device is {device}")
    try:
        load_library()
    except NativeUnavailable as error:
        raise ConfigError(f"{name}: {size} ranks need the native library: {error}") from None
    model = ModelConfig.from_pretrained(resolve(config.model))
    if problem := unsplittable(model, config.tensor_parallel):
        degrees = [str(each) for each in range(1, model.num_heads + 1) if not unsplittable(model, each)]
        raise ConfigError(f"tensor_parallel: {problem}; {', '.join(degrees)} would do")
    if (stages := config.pipeline_parallel) > model.num_layers:
        raise ConfigError(f"pipeline_parallel: {stages} is above num_hidden_layers, {model.num_layers}")
    if len(config.packed_weights.split(",")) not in (1, config.ranks):
        raise ConfigError(f"packed_weights: must be one path or {config.ranks}, got {config.packed_weights!r}")
    if stages > 1 and (config.kv_home == "host" or config.host_memory):
        given = f"kv_home {config.kv_home} and host_memory {config.host_memory}"
        raise ConfigError(f"pipeline_parallel: {stages} stages have no KV in host memory, got {given}")
    return exchange_floats(model.hidden_size)


def _source(config: EngineConfig, model: LoadedModel, kv: KvCache, spec: EngineSpec) -> SegmentSource | None:
    """Source of KV in host memory; None if there is none, or if kernels read host memory directly."""
    if not spec.host_pages or isinstance(model.decoder, NativeDecoder):
        return None
    size = config.segment_tokens or default_segment_tokens(model.device.type)
    if model.device.type == "cuda":
        return SegmentRing(kv, model.device, config.num_kv_buffers, size)
    return SegmentViews(kv, size)


def _log_loaded(model: LoadedModel, spec: EngineSpec, seconds: float) -> None:
    memory = huge_pages.resident()
    _log.info(
        "loaded %s on %s in %.1f s: %s, weights of %d bytes, KV %s in %d pages of %d tokens (%d bytes)%s, "
        "max_model_len %d, slots %d, threads %d, %d of %d MiB of memory in huge pages",
        model.path,
        model.device,
        seconds,
        dtype_name(model.dtype),
        model.decoder.weight_bytes,
        spec.kv_format.parts[0].dtype,
        spec.pages,
        spec.page_size,
        spec.pages * spec.page_size * spec.kv_format.token_bytes,
        f", {spec.host_pages} of them in host memory" if spec.host_pages else "",
        spec.max_model_len,
        spec.slots,
        torch.get_num_threads(),
        memory.huge >> 20,
        memory.total >> 20,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {name} is not available; torch finds {torch.cuda.device_count()} CUDA devices")
    return device


def kernels_for(wanted: str, device: torch.device) -> Kernels:
    """Kernels for a value of the setting `kernels`; ConfigError if native kernels are required but missing."""
    if device.type == "cpu":
        return select_kernels(wanted)
    if wanted == "native":
        raise ConfigError(f"kernels: native ones run on a CPU, the device is {device}")
    return Kernels(None, f"the device is {device}")


def _auto_dtype(checkpoint: str | None, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype; but float32 for float16 on a CPU.

    float32 has every float16 exactly. Most CPUs have no fast float16, and bfloat16 would drop three bits of a weight.
    """
    if checkpoint == "float16" and device.type == "cpu":
        return torch.float32
    return DTYPES.get(checkpoint or "", torch.float32)


def _max_model_len(wanted: int, model: int) -> int:
    if wanted > model:
        raise ConfigError(f"max_model_len: {wanted} is above the model's {model}")
    return wanted or model


def _home(config: EngineConfig, device: torch.device) -> torch.device:
    """Device of the pages of `kv_memory`."""
    return torch.device("cpu") if config.kv_home == "host" else device


def _kv_format(model: LoadedModel, dtype: torch.dtype, block_size: int) -> KvFormat:
    parts = attention_parts(dtype_name(dtype), model.config.num_kv_heads, model.config.head_dim)
    return KvFormat(parts, model.config.num_layers, block_size)


def _check_free_memory(name: str, wanted: int, device: torch.device) -> None:
    if wanted > (free := _free(device)):
        raise ConfigError(f"{name}: {wanted} bytes are asked for, {free} bytes are available on {device}")


def _free(device: torch.device) -> int:
    """Number of bytes that can be allocated on the device now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory.available()


def _pages(config: EngineConfig, page_bytes: int, page_size: int, max_model_len: int, device: torch.device) -> int:
    """Number of pages of the pool: those of `kv_memory`, or those that are useful of a part of free memory."""
    _check_free_memory("kv_memory", config.kv_memory, device)
    share = _DEVICE_FRACTION if device.type == "cuda" else _HOST_FRACTION
    room = config.kv_memory or int(_free(device) * share)
    pages = room // page_bytes
    if pages < 1:
        pool = f"{room} bytes ({'given' if config.kv_memory else 'automatic'})"
        if config.page_size:
            raise ConfigError(f"page_size: a page of {page_size} tokens has {page_bytes} bytes, kv_memory is {pool}")
        raise ConfigError(f"kv_memory: {pool} hold no page, which has {page_bytes} bytes")
    if config.kv_memory:
        return pages
    return min(pages, (config.slots + _WAITING_SEQUENCES) * -(-max_model_len // page_size))


def _host_pages(config: EngineConfig, page_bytes: int, pages: int, longest: int, device: torch.device) -> int:
    """Number of pages in host memory: all `pages` of the pool, none, or more beside those.

    `longest` is the number of pages of a sequence of `max_model_len` tokens.
    """
    if wanted := config.host_memory or config.cache_memory:
        beside = pages * page_bytes if _home(config, device).type == "cpu" else 0
        name = "host_memory with kv_memory" if beside else "host_memory"
        _check_free_memory(name, wanted + beside, torch.device("cpu"))
    if config.kv_home != "auto":
        return pages if config.kv_home == "host" else 0
    if config.host_memory:
        if (more := config.host_memory // page_bytes) < 1:
            given = config.host_memory
            raise ConfigError(f"host_memory: {given} bytes hold no page, which has {page_bytes} bytes")
        return more
    if device.type != "cuda" or pages >= longest:
        return 0
    more = min(longest, int(host_memory.available() * _HOST_FRACTION) // page_bytes)
    if more < longest:
        _log.warning(
            "the device can't hold a sequence of max_model_len, %d bytes of host memory hold %d of its %d pages: "
            "raise --host-memory",
            more * page_bytes,
            more,
            longest,
        )
    return more


def _min_overlap_chunk(model: LoadedModel, kv_dtype: torch.dtype, device: torch.device) -> int:
    """`min_overlap_chunk` of EngineSpec; 0 on a CPU, which copies nothing."""
    if device.type != "cuda":
        return 0
    group = model.config.num_heads // model.config.num_kv_heads
    rates = measure_rates(device, model.dtype)
    # The pool, which is allocated next, can't use memory that torch keeps of the measurement.
    torch.cuda.empty_cache()
    return min_overlap_chunk(*rates, group, 8 * kv_dtype.itemsize)


def measure_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Rates of a CUDA device: operations/s of a large product, and bytes/s of a copy from pinned memory."""
    one = torch.empty(_SQUARE, _SQUARE, dtype=dtype, device=device).normal_()
    flops = 2 * _SQUARE**3 / _seconds(lambda: one @ one, device)
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    return flops, _COPY_BYTES / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest time of several runs on the device in seconds, after one that is not timed."""
    run()
    found = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(torch.cuda.current_stream(device))
        run()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return float(min(found))
