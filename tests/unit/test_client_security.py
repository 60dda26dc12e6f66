"""Credentials of a client: its API key and its certificates."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from baton import AsyncClient, Client
from baton.cli.main import main
from baton.errors import ConfigError, InvalidRequest, Unauthenticated, Unavailable, Unsupported
from baton.process.ops import serve_ops
from baton.rpc.server import listen
from baton.telemetry.metrics import Exposition
from tests.certificates import fleet, tls
from tests.fake_router import Caller, Router, served


def use(address: str, **security: Any) -> None:
    with Client(address, **security) as client:
        client.get_model(timeout=60)
        list(client.generate("x", timeout=60))


async def test_both_clients_send_their_key_over_tls() -> None:
    router = Router()
    ca = fleet() / "ca.crt"
    async with served(router, tls=tls("router")) as listener:
        await asyncio.to_thread(use, listener.address, ca=ca, api_key="k-1")
        async with AsyncClient(listener.address, ca=str(ca), api_key="k-2") as client:
            await client.get_model()
            await client.complete("x")
        with pytest.raises(Unavailable):
            await asyncio.to_thread(use, listener.address, ca=ca, server_name="baton.example.org")
        await asyncio.to_thread(use, listener.address, ca=ca, server_name="router.baton")
    assert [caller.authorization for caller in router.callers] == ["Bearer k-1"] * 2 + ["Bearer k-2"] * 2 + [None] * 2


async def test_a_client_shows_its_certificate() -> None:
    router = Router()
    own = {"cert": fleet() / "client.crt", "key": fleet() / "client.key", "ca": fleet() / "ca.crt"}
    async with served(router, tls=tls("router"), roles=("client",)) as listener:
        await asyncio.to_thread(use, listener.address, **own)
        with pytest.raises(Unavailable):
            await asyncio.to_thread(use, listener.address, ca=own["ca"])
    assert router.callers == [Caller(None, "baton://client/client", frozenset({"client"}))] * 2


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("security", "words"),
    [
        ({"cert": "x.crt"}, "^key: is missing"),
        ({"key": "x.key"}, "^cert: is missing"),
        ({"ca": "/nowhere"}, "^ca: '/nowhere' can't be read: No such file"),
        ({"cert": fleet() / "client.crt", "key": fleet() / "ca.key"}, "^key: .*ca.key' is not the key of the certif"),
        ({"ca": __file__}, "^ca: .*_security.py' is not a PEM file"),
        ({"ca": fleet() / "ca.key"}, "^ca: .*ca.key' holds no certificate"),
    ],
)
async def test_a_bad_setting_is_named(client: Any, security: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        client("127.0.0.1:1", **security)


@pytest.mark.parametrize("key", ["", "two words", "new\nline", "ünï"])
def test_a_key_that_can_not_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^api_key: must be of printable ASCII") as caught:
        Client("127.0.0.1:1", api_key=key)
    assert not key or key not in str(caught.value)


async def test_a_client_without_a_key_is_told_how_to_give_one() -> None:
    """The words of the router's front door."""
    router = Router()
    router.error = Unauthenticated("an API key is needed, as authorization: Bearer KEY")
    async with served(router) as listener:
        with pytest.raises(Unauthenticated, match=r"Bearer KEY; give it as api_key \(--api-key-file, or "):
            await asyncio.to_thread(use, listener.address)


@pytest.mark.parametrize("content", ["", "two words", '{"keys": []}', '{"keys":[]}'])
def test_a_file_without_a_key_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(content)
    result = CliRunner().invoke(main, ["generate", "x", f"--api-key-file={tmp_path / 'keys'}"])
    assert result.exit_code == 2
    assert "'--api-key-file': " in result.stderr
    assert "keys' has no API key, which is one word" in " ".join(result.stderr.split())


async def test_generate_takes_the_key_from_the_environment_a_flag_or_a_file(tmp_path: Path) -> None:
    router = Router()
    async with served(router, tls=tls("router")) as listener:
        arguments = ["generate", f"--target={listener.address}", f"--ca={fleet() / 'ca.crt'}", "--quiet", "x"]

        def run(*more: str, **environ: str) -> int:
            return CliRunner(env=environ).invoke(main, [*arguments, *more]).exit_code

        assert await asyncio.to_thread(run, BATON_API_KEY="from-environment") == 0
        assert await asyncio.to_thread(run, "--api-key=from-flag", BATON_API_KEY="from-environment") == 0
        file = tmp_path / "api.key"
        file.write_text("from-file\n")
        assert await asyncio.to_thread(run, f"--api-key-file={file}", BATON_API_KEY="from-environment") == 0
        assert await asyncio.to_thread(run, f"--api-key-file={file}", "--api-key=from-flag") == 2
        assert await asyncio.to_thread(run, f"--api-key-file={tmp_path}") == 2
    keys = ["from-environment", "from-flag", "from-file"]
    assert [caller.authorization for caller in router.callers] == [f"Bearer {key}" for key in keys]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cert={}/client.crt"], "'--key': is missing"),
        (["--key={}/client.key"], "'--cert': is missing"),
        (["--cert={0}/client.crt", "--key={0}/router.key"], "router.key' is not the key of the certificate"),
        (["--ca={}/ca.crt", "--cert={0}/client.crt", "--key={0}/ca.crt"], "'--key': "),
    ],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["ledger"], ["cache", "stats"]])
def test_files_that_can_not_be_used_are_named_by_their_flags(command: list[str], flags: list[str], words: str) -> None:
    result = CliRunner().invoke(main, [*command, *(flag.replace("{}", "{0}").format(fleet()) for flag in flags)])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


async def problem(face: str, address: str, **security: Any) -> str:
    """The message of a call that finds no router, from either client."""
    if face == "async":
        async with AsyncClient(address, **security) as client:
            with pytest.raises((Unavailable, Unsupported)) as caught:
                await client.complete("x", timeout=60)
        return str(caught.value)

    def call() -> str:
        with Client(address, **security) as client, pytest.raises((Unavailable, Unsupported)) as caught:
            client.get_model(timeout=60)
        return str(caught.value)

    return await asyncio.to_thread(call)


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_a_client_is_told_what_it_reached(face: str) -> None:
    ca, others = fleet() / "ca.crt", fleet("theirs") / "ca.crt"
    async with (
        served(Router(), tls=tls("router")) as router,
        served(Router(), tls=tls("prefill"), roles=("router",)) as worker,
        served(Router(), tls=tls("mixed"), roles=("router",)) as mixed,
        listen("127.0.0.1:0", insecure=False, add=lambda server: None, services=[]) as plain,
        serve_ops("127.0.0.1:0", Exposition("router", "m"), not_ready=str) as ops,
    ):
        cases: list[tuple[str, dict[str, Any], str]] = [
            (router.address, {}, "closed the connection; if it expects TLS, give its CA (ca, --ca)"),
            (router.address, {"ca": others}, "has a certificate that the given CA did not sign: check ca (--ca)"),
            (router.address, {"ca": ca, "server_name": "x.org"}, "server_name (--server-name) is the name to expect"),
            (worker.address, {"ca": ca}, "): it is a prefill worker, and requests go to a router"),
            (mixed.address, {"ca": ca}, "): it is a mixed worker, and requests go to a router"),
            (worker.address, {"ca": ca, "server_name": "prefill.baton"}, "give cert and key (--cert, --key)"),
            (plain.address, {"ca": ca}, "does not speak TLS: leave out tls and ca (--tls, --ca), or check the address"),
            (plain.address, {}, "has no such method: requests go to the grpc address of a router"),
            (ops.address, {}, "requests go to the grpc address of a router, not to ops"),
        ]
        for address, security, words in cases:
            found = await problem(face, address, **security)
            assert found.startswith(f"{address} ")
            assert found.endswith(words)
        assert "has a certificate of other names (" in await problem(face, worker.address, ca=ca)


async def test_commands_keep_grpcs_own_log_off_standard_error() -> None:
    async with served(Router(), tls=tls("router"), roles=("client",)) as listener:
        flags = [f"--target={listener.address}", f"--ca={fleet() / 'ca.crt'}", "x"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton", "generate", *flags), stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 75
    assert said.decode().startswith("error: UNAVAILABLE: ")
    assert said.count(b"\n") == 1
