"""FetchKv against raw TCP: bytes a second and CPU seconds a gigabyte, between two processes over loopback.

    producer: paged pool ── FetchKv, checksums on ──▶ consumer: paged pool
              one buffer ── raw TCP ────────────────▶ one buffer             the same bytes, in turn

Rates move with whatever else the machine does, so only ratios of neighbours in time are worth anything: each repeat
takes raw TCP, FetchKv and raw TCP again, and is compared to the mean of the two. What arrived is compared, once a
shape, with what was sent.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from baton.bench.children import piped
from baton.bench.transfer_ends import SHAPES, Answer
from baton.errors import EngineError

STREAMS = (1, 2, 4)
TOKENS = 4096
_GB = 1e9


class End:
    """One of the two processes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.told = self._answer()

    def ask(self, do: str, **arguments: Any) -> Answer:
        """Send a command, and wait until it has been done."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Answer:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise EngineError("an end of the transfer bench has failed")
        answer: Answer = json.loads(line)
        return answer


@contextlib.contextmanager
def _started(role: str, shape: str, tokens: int, streams: int) -> Iterator[End]:
    command = [sys.executable, "-m", "baton.bench.transfer_ends", role, shape, str(tokens), str(streams)]
    with piped(command) as process:
        try:
            yield End(process)
        finally:
            # It holds nothing, and one whose peer has failed may wait for it.
            process.kill()


class Pair:
    """A producer and a consumer of one shape."""

    def __init__(self, producer: End, consumer: End, size: int) -> None:
        self._producer, self._consumer, self._size = producer, consumer, size
        self._fetches = 0

    def fetch(self, streams: int) -> Answer:
        """One fetch of each of `streams` exports at a time."""
        self._fetches += 1
        ids = [f"{self._fetches}/{stream}" for stream in range(streams)]
        before = self._producer.ask("open", ids=ids)["cpu"]
        return self._moved(streams, before, "fetch", {"kv": self._producer.told["kv"], "ids": ids})

    def raw(self, streams: int) -> Answer:
        """As many bytes over as many connections."""
        before = self._producer.ask("raw", streams=streams, size=self._size)["cpu"]
        arguments = {"port": self._producer.told["raw"], "streams": streams, "size": self._size}
        return self._moved(streams, before, "raw", arguments)

    def check(self) -> None:
        """Raise EngineError unless the consumer's pages hold what the producer's do."""
        if self._producer.ask("digests")["digests"] != self._consumer.ask("digests")["digests"]:
            raise EngineError("what was fetched is not what was exported")

    def _moved(self, streams: int, before: float, do: str, arguments: dict[str, Any]) -> Answer:
        received_before = self._consumer.ask("idle")["cpu"]
        done = self._consumer.ask(do, **arguments)
        sent = self._producer.ask("idle")["cpu"] - before
        moved = streams * self._size / _GB
        return {
            "gb_per_s": moved / done["seconds"],
            "sender_cpu_s_per_gb": sent / moved,
            "receiver_cpu_s_per_gb": (done["cpu"] - received_before) / moved,
        }


def measure(
    shapes: Sequence[str] = tuple(SHAPES),
    streams: Sequence[int] = STREAMS,
    tokens: int = TOKENS,
    repeats: int = 7,
) -> Generator[dict[str, Any], None, None]:
    """Medians by shape and number of streams, and the ratio of FetchKv's rate to raw TCP's: all so far, at each repeat.

    Raises EngineError if a process fails or what arrives is not what was sent.
    """
    found: dict[str, Any] = {}
    for shape in shapes:
        most = max(streams)
        with _started("producer", shape, tokens, most) as producer, _started("consumer", shape, tokens, most) as other:
            pair = Pair(producer, other, tokens * SHAPES[shape].token_bytes)
            pair.fetch(most)
            pair.check()
            runs: dict[str, Any] = {}
            for count in streams:
                for run in _compared(pair, count, repeats):
                    runs[str(count)] = run
                    about = {"bytes_a_stream": tokens * SHAPES[shape].token_bytes, "tokens": tokens}
                    found[shape] = {**about, "streams": runs}
                    yield {"shapes": found}


def _compared(pair: Pair, streams: int, repeats: int) -> Iterator[dict[str, Any]]:
    """What is known after each repeat."""
    raws, fetches = [pair.raw(streams)], []
    for _ in range(repeats):
        fetched = pair.fetch(streams)
        raws.append(pair.raw(streams))
        fetches.append(fetched)
        yield _ratios(fetches, raws)


def _ratios(fetches: Sequence[Answer], raws: Sequence[Answer]) -> dict[str, Any]:
    """Medians, and each fetch against the raw TCP before and after it."""
    rates = [raw["gb_per_s"] for raw in raws]
    ratios = [
        2 * fetch["gb_per_s"] / (before + after)
        for fetch, before, after in zip(fetches, rates, rates[1:], strict=False)
    ]
    return {
        "fetch_kv": _medians(fetches),
        "raw_tcp": _medians(raws),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _medians(runs: Sequence[Answer]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
