"""Baton serves large language models with prefill and decode on separate machines.

`Client` and `AsyncClient` talk to a router; they load when first used, so that importing `baton` costs
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from baton import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
