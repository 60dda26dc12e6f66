"""Channels between processes, and the options that both ends of a connection share.

A peer that is closed is noticed by TCP at once; one that is stopped or cut off by keepalive pings, within
`KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS`. Pings are answered by gRPC's own threads, so a peer that
computes, or a stream on which nothing is said, is not mistaken for a dead one. KV has a subchannel pool of
its own, so that its bulk never shares a connection with control.
"""

from __future__ import annotations

import grpc

CONTROL_MESSAGE_BYTES = 64 << 20
"""Largest message that a control or inference listener, or a client, receives."""

KV_MESSAGE_BYTES = 16 << 20
"""Largest message on a KV connection: a frame of about 1 MiB, or the handoff of a very long prompt."""

KEEPALIVE_TIME_MS = 2000
KEEPALIVE_TIMEOUT_MS = 5000

Options = list[tuple[str, int]]

KEEPALIVE: Options = [
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # No keepalive ping is sent while a bandwidth probe's ping is in flight, which would have a minute.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
]

_DIAL: Options = [
    *KEEPALIVE,
    # Workers are dialled directly, whatever proxy the environment names for the outside world.
    ("grpc.enable_http_proxy", 0),
    # A restarted worker should be found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

CLIENT_OPTIONS: Options = [*_DIAL, ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES)]


def control_channel(address: str) -> grpc.aio.Channel:
    """A channel to a router's or a worker's control listener, "host:port"."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


def kv_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker's kv listener, "host:port", on connections of its own."""
    options = [
        *_DIAL,
        ("grpc.max_receive_message_length", KV_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)
