"""Types of command-line values that more than one command takes; each refuses by flag and value."""

from __future__ import annotations

from typing import Any

import click

from baton.config import parse_address, parse_bytes
from baton.errors import ConfigError, InvalidRequest

DEFAULT_GRPC = "127.0.0.1:50050"


class Address(click.ParamType[str]):
    """HOST:PORT."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text itself, once it is known to be an address."""
        try:
            parse_address(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Size(click.ParamType[int]):
    """A size in bytes such as 4GiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        try:
            return parse_bytes(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class TokenIds(click.ParamType[list[int]]):
    """Token ids with commas between them."""

    name = "1,2,3"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The ids."""
        ids = []
        for text in str(value).split(","):
            if not text.strip().isdecimal():
                self.fail(str(InvalidRequest("token id", "must be a number", text.strip())), param, ctx)
            ids.append(int(text))
        return ids
