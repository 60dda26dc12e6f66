"""Services of a fleet as processes.

    with Services(model=directory, redis=url) as services:
        prefill, decode = services.worker("prefill"), services.worker("decode", slots=8)
        router = services.router([prefill], [decode]).grpc

Settings become flags. All processes end with the block, and with this process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.children import Child, child
from bench.up import Router

SECRET = "a secret of the bench"
READY_S = STOP_S = 60.0
_MODULES = {"prefill": "prefill_svc", "decode": "decode_svc", "router": "router"}


@dataclass(frozen=True, slots=True)
class Worker:
    """Addresses of one worker, "host:port"."""

    control: str
    ops: str


class Services:
    """Processes of one fleet; `settings` go to every worker, those of `worker` to one.

    With `watched`, they answer questions about the holds of loops and locks (`bench.holds`). `processes` are in the
    order in which they were started.
    """

    def __init__(self, *, model: str, watched: bool = False, **settings: Any) -> None:
        self._model = model
        self._watched = watched
        self._settings = settings
        self.processes: list[Child] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def worker(self, role: str, **settings: Any) -> Worker:
        """A worker that listens: its model is loaded."""
        flags = _flags({"model": self._model, **self._settings, **settings})
        where = self._start(role, flags)
        return Worker(where["control"], where["ops"])

    def router(self, prefill: Sequence[Worker], decode: Sequence[Worker], **settings: Any) -> Router:
        """Start a router for these workers and wait until it serves."""
        workers = {role: [each.control for each in them] for role, them in (("prefill", prefill), ("decode", decode))}
        places = {role: ",".join(addresses) for role, addresses in workers.items()}
        flags = _flags({"model": self._model, **places, **settings})
        where = self._start("router", flags)
        wait_until_serving(where["grpc"])
        return Router(where["grpc"], where["ops"], where.get("http", ""))

    def _start(self, name: str, flags: Sequence[str]) -> dict[str, str]:
        module = ["bench.holds", name] if self._watched else [_MODULES[name]]
        variables = {"BATON_FLEET_SECRET": SECRET, "BATON_LOG_LEVEL": "warning"}
        command = [sys.executable, "-m", *module, *flags]
        process = self._stack.enter_context(child(command, environ=variables, grace_s=STOP_S))
        self.processes.append(process)
        return process.listening()


def wait_until_serving(address: str) -> None:
    """Return once the process at `address` serves; raises grpc.RpcError after READY_S."""
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        for answer in watch(health_pb2.HealthCheckRequest(), timeout=READY_S, wait_for_ready=True):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value not in ("", None)]
