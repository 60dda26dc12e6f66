"""Longest time that one large prompt holds the router's event loop; writes bench/results/event-loop.json.

    python -m bench.event_loop [--tokens 1000000] [--requests 10] [--starts 3] [--only ids ascii]

A router between simulated workers gets prompts of so many tokens: token ids (`ids`), token ids of fixed width, which
Baton's client sends (`long_ids`), a text in ASCII, one that is not (`unicode`), and the latter as a `chat`, and with
Tokenize. The texts are random words, tokenized by the bundled model's tokenizer. Stretches are measured by
`bench.holds`, from half a second before a request until half a second after its end; `bench.worker_loops` measures
those of workers.

`first` are the first requests of `--starts` processes, `later` are `--requests` further ones of the first process.
`idle` is the time before them, without a request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from baton import bundled
from baton.pb import inference_pb2, inference_pb2_grpc
from baton.rpc.channel import CLIENT_OPTIONS
from baton.tokenizer import Tokenizer
from bench.children import Child, child
from bench.common import save
from bench.services import wait_until_serving

Request: TypeAlias = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest

MAX_MODEL_LEN = 1 << 20
SETTLE_S = 0.5


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
    workers = [sys.executable, "-m", "bench.router_workers", "--step-ms=20"]
    with child(workers, name="the workers") as them:
        where = them.listening()
        flags = [f"--model={model}", f"--served-model-name={bundled.path().name}", "--log-level=error"]
        flags += [f"--{role}={address}" for role, address in where.items()]
        command = [sys.executable, "-m", "bench.holds", "router", *flags]
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
    longest = process.ask("longest")["loop"]
    return {name: longest[name] for name in ("wall_ms", "held_ms")}


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
    main()
