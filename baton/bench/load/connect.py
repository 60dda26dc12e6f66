"""A connection to a target, by the scheme of its URL."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from baton.bench.load.grpc_target import GrpcTarget
from baton.bench.load.targets import Place, Target, is_grpc


def connect(place: Place) -> AbstractAsyncContextManager[Target]:
    """A target as a context that ends its connections. Raises ConfigError, naming a setting that can't be used."""
    if is_grpc(place.url):
        return GrpcTarget(place)
    # aiohttp comes with an extra.
    from baton.bench.load.http_target import http_target

    return http_target(place)
