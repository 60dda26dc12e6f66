"""A worker as a real process with the fake engine, whose tokens can be computed by hand.

    python -m tests.chaos.process decode --step-time 0.01 --slots 8 --pages 400 [flags of the service]

Flags that are not the engine's are the service's own; those of the environment count too.

SIGUSR2 makes the engine hang for ever, at the next step or chunk. SIGUSR1 makes look-ups of names hang, and SIGALRM
ends that.
"""

import argparse
import signal
import socket
import sys
import threading
import time
from typing import Any

from baton.config.worker import DecodeConfig, MixedConfig, PrefillConfig
from baton.engine.fake import FakeEngine
from baton.process.service import Running
from baton.process.service import main as serve
from baton.telemetry.logs import configure

VOCABULARY = 1000
HEAD_DIM = 8
LAYERS, HEADS = 2, 2
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("role", choices=("prefill", "decode", "mixed"))
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--chunk-time", type=float, default=0.0)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--model-len", type=int, default=4096)
    own, rest = parser.parse_known_args()
    hangs, resolves = threading.Event(), threading.Event()
    resolves.set()
    signal.signal(signal.SIGUSR2, lambda *_: hangs.set())
    signal.signal(signal.SIGUSR1, lambda *_: resolves.clear())
    signal.signal(signal.SIGALRM, lambda *_: resolves.set())
    look_up = socket.getaddrinfo

    def delay(seconds: float) -> None:
        time.sleep(seconds)
        while hangs.is_set():
            time.sleep(3600)

    def getaddrinfo(*args: Any, **kwargs: Any) -> Any:
        resolves.wait()
        return look_up(*args, **kwargs)

    socket.getaddrinfo = getaddrinfo
    engine = FakeEngine(
        vocab_size=VOCABULARY,
        max_model_len=own.model_len,
        layers=LAYERS,
        heads=HEADS,
        head_dim=HEAD_DIM,
        pages=own.pages,
        slots=own.slots,
        step_time=own.step_time,
        chunk_time=own.chunk_time,
        delay=delay,
    )

    def prefill(config: PrefillConfig) -> Running:
        from prefill_svc.app import run

        configure(config.log_level, own.role, config.worker_id)
        return run(config, engine=engine)

    def decode(config: DecodeConfig) -> Running:
        from decode_svc.app import run

        configure(config.log_level, own.role, config.worker_id)
        return run(config, engine=engine)

    def mixed(config: MixedConfig) -> Running:
        from mixed_svc.app import run

        configure(config.log_level, own.role, config.worker_id)
        return run(config, engine=engine)

    sys.argv[1:] = rest
    if own.role == "prefill":
        return serve(own.role, "tests.chaos.process", PrefillConfig, prefill)
    sys.argv += ["--slots", str(own.slots)]
    if own.role == "mixed":
        return serve(own.role, "tests.chaos.process", MixedConfig, mixed)
    return serve(own.role, "tests.chaos.process", DecodeConfig, decode)


if __name__ == "__main__":
    sys.exit(main())
