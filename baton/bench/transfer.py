"""FetchKv against raw TCP: bytes a second and CPU seconds a gigabyte, between two processes over loopback.

    producer: paged pool ── FetchKv, checksums on ──▶ consumer: paged pool
              one buffer ── raw TCP ────────────────▶ one buffer             the same bytes, in turn

Rates change with the other load of the machine, so only ratios of neighbouring runs count: each repeat measures raw
TCP, FetchKv and raw TCP again, and FetchKv is compared with the mean of the two. For each shape, the KV that arrived is
compared once with the KV that was sent.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from baton.bench.children import Child, child
from baton.bench.pairing import between, medians
from baton.bench.transfer_ends import SHAPES, Answer
from baton.errors import EngineError

STREAMS = (1, 2, 4)
TOKENS = 4096
_GB = 1e9


def _started(role: str, shape: str, tokens: int, streams: int) -> AbstractContextManager[Child]:
    command = [sys.executable, "-m", "baton.bench.transfer_ends", role, shape, str(tokens), str(streams)]
    return child(command, name=f"the {role} of the transfer bench")


class Pair:
    """A producer and a consumer of one shape."""

    def __init__(self, producer: Child, consumer: Child, size: int) -> None:
        self._producer, self._consumer, self._size = producer, consumer, size
        self._listens, _ = producer.answer()["ready"], consumer.answer()
        self._fetches = 0

    def fetch(self, streams: int) -> Answer:
        """One fetch of each of `streams` exports at a time."""
        self._fetches += 1
        ids = [f"{self._fetches}/{stream}" for stream in range(streams)]
        before = self._producer.ask("open", ids=ids)["cpu"]
        return self._moved(streams, before, "fetch", {"kv": self._listens["kv"], "ids": ids})

    def raw(self, streams: int) -> Answer:
        """The same number of bytes over the same number of connections."""
        before = self._producer.ask("raw", streams=streams, size=self._size)["cpu"]
        arguments = {"port": self._listens["raw"], "streams": streams, "size": self._size}
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

    Raises ChildFailed if a process fails, EngineError if what arrives is not what was sent.
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
    """The results so far, after each repeat."""
    turns = []
    for turn in between(itertools.repeat(partial(pair.fetch, streams), repeats), partial(pair.raw, streams)):
        turns.append(turn)
        yield _ratios(turns)


def _ratios(turns: Sequence[tuple[Answer, Answer, Answer]]) -> dict[str, Any]:
    """Medians, and each fetch against the raw TCP before and after it."""
    ratios = [2 * fetch["gb_per_s"] / (before["gb_per_s"] + after["gb_per_s"]) for fetch, before, after in turns]
    return {
        "fetch_kv": medians([fetch for fetch, *_ in turns]),
        "raw_tcp": medians([turns[0][1], *(after for *_, after in turns)]),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }
