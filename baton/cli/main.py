"""`baton`: the group of all commands."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

# Commands report connection errors better than gRPC's own log. gRPC reads the variable when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
try:
    import click

    from baton.cli.bench import bench
    from baton.cli.cache import cache
    from baton.cli.certs import certs
    from baton.cli.demo import demo
    from baton.cli.doctor import doctor
    from baton.cli.generate import generate
    from baton.cli.key import key
    from baton.cli.ledger import ledger
    from baton.cli.plan import plan
    from baton.cli.up import up
    from baton.config.options import STYLE
except KeyboardInterrupt:
    # Imports take so long that Ctrl-C may come during them.
    sys.exit(130)


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write to a full disk."""


_ELSEWHERE = {
    "serve": "`baton up` serves a model",
    "chat": "`baton generate --chat FILE` continues a conversation",
    "complete": "`baton generate PROMPT` completes a prompt",
}
"""Commands that other servers have, and ours for them."""


class _Commands(click.Group):
    """Commands that report a full disk in one line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; name ours for those that other servers have."""
        if args and args[0] in _ELSEWHERE:
            raise click.UsageError(f"No such command {args[0]!r}: {_ELSEWHERE[args[0]]}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            what = repr(error.filename) if error.filename else "the output"
            raise click.ClickException(f"{what} can't be written: {error.strerror}") from None


@click.group(cls=_Commands, context_settings=STYLE)
@click.version_option(package_name="baton", prog_name="baton")
def main() -> None:
    """Serve large language models with prefill and decode on separate machines."""


for _command in (up, generate, demo, doctor, ledger, cache, certs, key, plan, bench):
    main.add_command(_command)
