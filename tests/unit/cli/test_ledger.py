"""`baton ledger`: one line an owner, and whichever name a certificate has."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from click.testing import CliRunner, Result

from baton.cli.main import main
from baton.ledger import Ledger, LedgerEntry
from baton.pb import admin_pb2, admin_pb2_grpc
from baton.rpc.admin import ADMIN_SERVICE, ledger_to_proto
from baton.rpc.server import Listener, listen
from tests.certificates import fleet, tls


class Process(admin_pb2_grpc.AdminServicer):
    """A process with a ledger, which notes the API key of each caller."""

    def __init__(self, role: str, violation: str = "") -> None:
        self._ledger = Ledger(f"{role}-1", role, "i", (LedgerEntry("r/1", "reservation", "held"),), violation=violation)
        self.keys: list[Any] = []

    async def Ledger(self, request: Any, context: Any) -> admin_pb2.LedgerResponse:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        return ledger_to_proto(self._ledger)


@asynccontextmanager
async def served(process: Process, **keywords: Any) -> AsyncIterator[Listener]:
    def add(server: grpc.aio.Server) -> None:
        admin_pb2_grpc.add_AdminServicer_to_server(process, server)

    async with listen("127.0.0.1:0", insecure=False, add=add, services=[ADMIN_SERVICE], **keywords) as listener:
        yield listener


async def ledger(*arguments: str) -> Result:
    return await asyncio.to_thread(partial(CliRunner().invoke, main, ["ledger", *arguments], env={"COLUMNS": "80"}))


async def test_one_command_asks_routers_and_workers_and_no_worker_sees_the_key() -> None:
    processes = [Process(role) for role in ("router", "prefill", "decode")]
    files = {"ca": "ca.crt", "cert": "admin.crt", "key": "admin.key"}
    flags = [f"--{flag}={fleet() / file}" for flag, file in files.items()]
    async with (
        served(processes[0], tls=tls("router")) as router,
        served(processes[1], tls=tls("prefill"), roles=("admin",)) as prefill,
        served(processes[2], tls=tls("decode"), roles=("admin",)) as decode,
        served(Process("admin"), tls=tls("client")) as other,
    ):
        targets = ",".join(listener.address for listener in (router, prefill, decode))
        result = await ledger(f"--target={targets}", *flags, "--api-key=k-1")
        assert (result.exit_code, result.stderr) == (0, "")
        assert [process.keys for process in processes] == [["Bearer k-1"], [None], [None]]
        strange = await ledger(f"--target={other.address}", *flags)
        assert strange.exit_code == 75
        assert "has a certificate of other names (" in strange.stderr
        named = await ledger(f"--target={decode.address}", *flags, "--server-name=prefill.baton")
        assert named.exit_code == 75


async def test_a_worker_of_several_ranks_shows_its_degrees() -> None:
    process = Process("decode")
    async with served(process) as listener:
        one = await ledger(f"--target={listener.address}")
        process._ledger = replace(process._ledger, tensor_parallel=2, pipeline_parallel=3)
        several = await ledger(f"--target={listener.address}")
        listed = await ledger(f"--target={listener.address}", "--json")
    assert "ranks" not in one.stdout
    assert several.stdout.splitlines()[1] == "6 ranks: tensor parallel 2, pipeline parallel 3"
    found = json.loads(listed.stdout)[0]
    assert (found["tensor_parallel"], found["pipeline_parallel"]) == (2, 3)


async def test_a_wrong_sum_and_a_silent_process_have_statuses_of_their_own() -> None:
    async with served(Process("decode", violation="3 pages have no owner")) as listener:
        wrong = await ledger(f"--target={listener.address}")
        both = await ledger(f"--target={listener.address},127.0.0.1:1")
    silent = await ledger("--target=127.0.0.1:1")
    assert (wrong.exit_code, both.exit_code, silent.exit_code) == (1, 1, 75)
    assert wrong.stderr == "error: decode decode-1: 3 pages have no owner\n"
