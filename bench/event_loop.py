"""How long one large prompt holds the router's event loop at a stretch; writes bench/results/event-loop.json.

    python -m bench.event_loop [--tokens 1000000] [--requests 10] [--starts 3] [--only ids ascii]

A router between simulated workers gets prompts of so many tokens: token ids (`ids`), token ids of fixed width, which
Baton's client sends (`long_ids`), a text in ASCII, one that is not (`unicode`), and the latter as a `chat`, and with
Tokenize. The texts are random words, tokenized by the bundled model's tokenizer. A timer of the router's event loop is
due every half millisecond. A stretch is the time by which it is late, from half a second before a request until half a
second after its end. It includes the time in which the loop waits for a thread that has the interpreter's lock.

`wall_ms` is the longest stretch. When other programs use the cores, they are part of it. `held_ms` is the longest one
without the time that the loop's thread waited for a core, and not more than the CPU time of the router's threads in it.
`first` are the first requests of `--starts` processes, `later` are `--requests` further ones of the first process.
`idle` is the time before them, without a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from baton import bundled
from baton.bench.children import Child, child
from baton.config.router import RouterConfig
from baton.pb import inference_pb2, inference_pb2_grpc
from baton.process import App
from baton.process import main as run_service
from baton.rpc.channel import CLIENT_OPTIONS
from baton.tokenizer import Tokenizer
from bench.common import save
from bench.services import wait_until_serving
from router.__main__ import start

Request: TypeAlias = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest

TICK_S = 0.0005
MAX_MODEL_LEN = 1 << 20
SETTLE_S = 0.5
_SERVE = "serve"


class Stretches:
    """A timer of the event loop, and by how much it was late at most."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._longest = {"wall_ms": 0.0, "held_ms": 0.0}
        self._start()

    def _start(self) -> None:
        self._waited, self._cpu = self._read_waited(), time.process_time()
        self._due = self._loop.time() + TICK_S
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        late = self._loop.time() - self._due
        held = min(late - (self._read_waited() - self._waited), time.process_time() - self._cpu)
        for name, stretch in (("wall_ms", late), ("held_ms", held)):
            self._longest[name] = max(self._longest[name], 1e3 * stretch)
        self._start()

    def _read_waited(self) -> float:
        """Seconds that this thread was ready to run and had no core (Documentation/scheduler/sched-stats.rst)."""
        return int(os.pread(self._stat, 128, 0).split()[1]) / 1e9

    def answer(self) -> None:
        """Tell the longest stretches since the last question, for a line of standard input."""
        if sys.stdin.readline():
            print(json.dumps(self._longest), flush=True)
            self._longest = dict.fromkeys(self._longest, 0.0)
        else:
            self._loop.remove_reader(sys.stdin)


@contextlib.asynccontextmanager
async def watched(config: RouterConfig) -> AsyncIterator[App]:
    """A router that answers questions on standard input."""
    async with start(config) as app:
        asyncio.get_running_loop().add_reader(sys.stdin, Stretches().answer)
        yield app


def requests(count: int) -> dict[str, Request]:
    """Requests of about `count` tokens."""
    rng = random.Random(1)
    tokenizer = Tokenizer.load(bundled.path())
    ids = [rng.randrange(300, 4000) for _ in range(count)]

    def text(words: list[str]) -> str:
        """Random words, as many as make `count` tokens."""
        sample = " ".join(rng.choices(words, k=10_000))
        each = len(tokenizer.encode(sample)) / 10_000
        return " ".join(rng.choices(words, k=int(count / each)))

    ascii_words = ["return", "the", "value", "self", "import", "of", "class", "raise", "def", "for", "name", "length"]
    other = text([*ascii_words, "größe", "länge", "für", "日本"])
    sampling = inference_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    made: dict[str, dict[str, Any]] = {
        "ids": {"token_ids": inference_pb2.TokenIds(ids=ids)},
        "long_ids": {"token_ids": inference_pb2.TokenIds(long_ids=ids)},
        "ascii": {"text": text(ascii_words)},
        "unicode": {"text": other},
        "chat": {"chat": inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=other)])},
    }
    generate = {name: inference_pb2.GenerateRequest(sampling=sampling, **prompt) for name, prompt in made.items()}
    return {**generate, "tokenize": inference_pb2.TokenizeRequest(text=other)}


@contextlib.contextmanager
def router(model: Path) -> Iterator[tuple[str, Child]]:
    """A router between simulated workers: where it serves, and its process."""
    workers = [sys.executable, "-m", "baton.bench.router_workers", "--step-ms=20"]
    with child(workers, name="the workers") as them:
        where = them.listening()
        flags = [f"--model={model}", f"--served-model-name={bundled.path().name}", "--log-level=error"]
        flags += [f"--{role}={address}" for role, address in where.items()]
        command = [sys.executable, "-m", "bench.event_loop", _SERVE, *flags]
        with child(command, name="the router") as process:
            address = process.listening()["grpc"]
            wait_until_serving(address)
            yield address, process


def ask(process: Child, call: Callable[[], None] = lambda: None) -> dict[str, float]:
    """The longest stretches while a request runs, and for a while before and after it, in milliseconds."""
    process.ask("longest")
    time.sleep(SETTLE_S)
    call()
    time.sleep(SETTLE_S)
    return {name: round(stretch, 2) for name, stretch in process.ask("longest").items()}


def serve(
    model: Path, request: Request, count: int
) -> tuple[dict[str, float], dict[str, float], list[dict[str, float]]]:
    """Stretches of a new router: without a request, of its first one, and of `count` later ones."""
    with router(model) as (address, process), grpc.insecure_channel(address, CLIENT_OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stub.GetModel(inference_pb2.GetModelRequest())

        def call() -> None:
            if isinstance(request, inference_pb2.TokenizeRequest):
                stub.Tokenize(request)
            else:
                for _ in stub.Generate(request):
                    pass

        return ask(process), ask(process, call), [ask(process, call) for _ in range(count)]


def columns(rows: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """The values of each name."""
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def measure(model: Path, request: Request, later: int, starts: int) -> dict[str, Any]:
    """Stretches of one kind of prompt."""
    runs = [serve(model, request, 0 if number else later) for number in range(starts)]
    idle, first, others = zip(*runs, strict=True)
    stretches = {"idle": columns(idle), "first": columns(first), "later": columns(others[0])}
    return {"bytes": request.ByteSize(), **stretches}


def write_checkpoint(folder: Path) -> Path:
    """The bundled checkpoint without its weights, for prompts of a million tokens."""
    for file in bundled.path().glob("*.j*"):
        (folder / file.name).write_text(file.read_text())
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": MAX_MODEL_LEN}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["ids", "long_ids", "ascii", "unicode", "chat", "tokenize"])
    arguments = parser.parse_args()
    made = requests(arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder))
        for name in arguments.only:
            save("event-loop", measure(model, made[name], arguments.requests, arguments.starts), name)


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        del sys.argv[1]
        run_service("router", "bench.event_loop", RouterConfig, watched)
    main()
