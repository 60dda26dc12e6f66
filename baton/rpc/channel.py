"""Channels between processes, the options that both ends of a connection share, and the detection of silent peers.

TCP reports a closed peer at once. Keepalive pings find a peer that is stopped or cut off, within
`KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS`. gRPC's own threads answer pings, so a peer that
is busy computing, or a silent stream, is not mistaken for a dead one. KV has a subchannel pool of
its own, so that it never shares a connection with control.

The credentials of a channel do not change. Code that keeps a channel for long must compare the `generation` of its
`Tls` with the one that the channel was made with, and dial again when it differs.

`SilenceTimer` finds a stream on which no message came for too long. After a process was stopped, or its event loop was
blocked, all its timers fire at once, before it has read the messages that came meanwhile. So a check that runs late
does not end the stream, but waits once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from baton.rpc.tls import Tls, role_name

CONTROL_MESSAGE_BYTES = 64 << 20
"""Largest message that a worker's control listener or a client receives, and the most that a router's listener may."""

KV_MESSAGE_BYTES = 16 << 20
"""Largest message on a KV connection: a frame of about 4 MiB, or the handoff of a very long prompt."""

KEEPALIVE_TIME_MS = 2000
KEEPALIVE_TIMEOUT_MS = 5000

Options = Sequence[tuple[str, int | str]]

KEEPALIVE: Options = [
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # gRPC sends no keepalive ping while a bandwidth probe's ping is in flight, whose own timeout is a minute.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
]

_DIAL: Options = [
    *KEEPALIVE,
    # Dial workers directly, even if the environment sets a proxy.
    ("grpc.enable_http_proxy", 0),
    # Connect to a restarted worker at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In fact the time limit of one connection attempt, TCP and TLS handshake together.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 250),
]

CLIENT_OPTIONS: Options = [*_DIAL, ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES)]


METADATA_BYTES, METADATA_MAX_BYTES = 16 << 10, 32 << 10
"""Bytes of a call's metadata above which a listener may refuse it, and above which it always refuses it."""


def control_channel(address: str, tls: Tls | None = None, role: str = "router") -> grpc.aio.Channel:
    """A channel to the control listener of a worker, or to a router, at "host:port".

    With `tls` the peer must have a certificate of `role`. The channel keeps the credentials of `tls.generation`.
    """
    return _channel(address, tls, role, CLIENT_OPTIONS)


def kv_channel(address: str, tls: Tls | None = None, role: str = "prefill") -> grpc.aio.Channel:
    """A channel to the kv listener of a worker at "host:port", which never shares a connection with other channels.

    `tls` and `role` have the same meaning as in `control_channel`.
    """
    options = [
        *_DIAL,
        ("grpc.max_receive_message_length", KV_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return _channel(address, tls, role, options)


def _channel(address: str, tls: Tls | None, role: str, options: Options) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [*options, ("grpc.ssl_target_name_override", role_name(role))]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=named)


HEARTBEAT_S = 1.0
"""Most seconds between two messages of a live peer."""

SILENCE_S = 5.0
"""Seconds without a message after which a peer counts as dead, stopped or cut off."""

LATE_S = 0.5
"""Seconds by which a timer may be late. If it is later, this process was stopped or busy, and no peer is to blame."""


class SilenceTimer:
    """Calls `on_silence` once if `reset` is not called for `limit_s` seconds; use as a context manager."""

    def __init__(self, limit_s: float, on_silence: Callable[[], object]) -> None:
        self.limit_s = limit_s
        self.expired = False
        """Whether the stream was silent for too long."""
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._checked_at = 0.0
        self._expires_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> SilenceTimer:
        self.reset()
        self._arm(self._expires_at)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching the stream."""
        if self._timer is not None:
            self._timer.cancel()

    def ended_call(self) -> bool:
        """Whether the current CancelledError comes from `on_silence`, and not from a cancellation of the task."""
        # The task is not kept by callers: task, error, traceback and a caller's variable would form a cycle, and all
        # that the call holds would wait for the garbage collector.
        task = asyncio.current_task()
        return self.expired and not (task is not None and task.cancelling())

    def reset(self) -> None:
        """Start again, because a message came."""
        self._expires_at = self._loop.time() + self.limit_s

    def _arm(self, due: float) -> None:
        self._checked_at = due
        self._timer = self._loop.call_at(due, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if now < self._expires_at:
            self._arm(self._expires_at)
        elif now > self._checked_at + LATE_S:
            self._arm(now + min(LATE_S, self.limit_s))
        else:
            self.expired = True
            self._on_silence()
