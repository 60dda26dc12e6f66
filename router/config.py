"""Settings of a router."""

from baton.config.router import RouterConfig

__all__ = ["RouterConfig"]
