"""The clients of `baton bench router`, in a process of their own.

    streaming                                on standard output once every stream has had two tokens
    ...                                      until the end of standard input; then all streams are cancelled
    {"streams": [[[time, bytes], ...]], ...} what came, with CLOCK_MONOTONIC in nanoseconds

The process fails if a stream has not had these tokens within START_S. Messages are kept as bytes and parsed at the end,
so that parsing does not delay the arrival times. A slow client reads a few messages, and the rest only at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from typing import Any

import grpc

from baton import executors
from baton.pb import inference_pb2

START_S = 60.0
_METHOD = "/baton.v1.Inference/Generate"
_PROMPT = 16
_CONNECTIONS = 8
_SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
]
_SLOW_READS = 4
_LAST_READS_S = 1.0


class Stream:
    """One request and the messages that came."""

    def __init__(self, channel: grpc.aio.Channel, max_tokens: int) -> None:
        self.arrivals: list[tuple[int, bytes]] = []
        sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[300] * _PROMPT),
            sampling=sampling,
            cache=inference_pb2.CACHE_POLICY_OFF,
        )
        method = channel.unary_stream(_METHOD, request_serializer=inference_pb2.GenerateRequest.SerializeToString)
        self.call = method(request)

    async def read(self, count: int | None = None) -> None:
        """Take `count` messages, or all."""
        arrivals, now = self.arrivals, time.monotonic_ns
        while count is None or count > 0:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                return
            arrivals.append((now(), message))
            count = None if count is None else count - 1

    def tokens(self) -> list[tuple[int, list[int]]]:
        """Arrival time and token ids of each message."""
        parse = inference_pb2.GenerateResponse.FromString
        events = ((at, parse(message)) for at, message in self.arrivals)
        return [(at, [token.token_id for delta in event.choices for token in delta.tokens]) for at, event in events]


async def _run(targets: list[str], streams: int, slow: int, max_tokens: int) -> dict[str, Any]:
    # Connections of their own, so that routers that share a port share them.
    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(targets[i % len(targets)], options=own) for i in range(_CONNECTIONS)]
    narrow = grpc.aio.insecure_channel(targets[0], options=_SMALL_WINDOW)
    async with asyncio.timeout(START_S):
        await asyncio.gather(*(channel.channel_ready() for channel in (*channels, narrow)))
        slows = [Stream(narrow, max_tokens) for _ in range(slow)]
        await asyncio.gather(*(stream.read(_SLOW_READS) for stream in slows))
        quick = [Stream(channels[i % len(channels)], max_tokens) for i in range(streams)]
        await asyncio.gather(*(stream.read(2) for stream in quick))
    gc.collect()
    gc.freeze()
    gc.disable()
    reading = [asyncio.create_task(stream.read()) for stream in quick]
    print("streaming", flush=True)
    await executors.run(executors.WORK, sys.stdin.read)
    for task in reading:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    kept = [asyncio.create_task(stream.read(32)) for stream in slows]
    if kept:
        await asyncio.wait(kept, timeout=_LAST_READS_S)
    for stream in (*quick, *slows):
        stream.call.cancel()
    for channel in (*channels, narrow):
        await channel.close()
    most = [max(len(tokens) for _, tokens in stream.tokens()) for stream in slows]
    return {"streams": [stream.tokens() for stream in quick], "slow_most_tokens_in_a_message": most}


def main() -> None:
    """Stream until the end of standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--slow", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, required=True)
    given = parser.parse_args()
    print(json.dumps(asyncio.run(_run(given.targets, given.streams, given.slow, given.max_tokens))), flush=True)


if __name__ == "__main__":
    main()
