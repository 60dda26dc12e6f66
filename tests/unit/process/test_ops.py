"""The ops listener and the log lines."""

import asyncio
import http.client
import io
import logging
import signal

import pytest

from baton.errors import ConfigError
from baton.process.ops import serve_ops
from baton.telemetry.logs import LineFormatter, configure
from baton.telemetry.metrics import SLOTS, Exposition

METRICS = Exposition("decode", "m", measure=lambda: SLOTS.labels("used").set(3))


async def get(address: str, path: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        connection = http.client.HTTPConnection(address, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def test_live_ready_metrics_and_nothing_else() -> None:
    ready = False
    before = signal.getsignal(signal.SIGTERM)
    async with serve_ops("127.0.0.1:0", METRICS, ready=lambda: ready) as ops:
        assert (await get(ops.address, "/live"))[0] == 200
        assert (await get(ops.address, "/ready"))[0] == 503
        ready = True
        assert (await get(ops.address, "/ready"))[0] == 200
        status, text = await get(ops.address, "/metrics")
        assert status == 200
        assert 'baton_slots{model_name="m",role="decode",state="used"} 3.0\n' in text
        for path in ("/", "/docs", "/openapi.json", "/live/x"):
            assert (await get(ops.address, path))[0] == 404
        assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ConnectionRefusedError):
        await get(ops.address, "/live")


async def test_a_taken_port_is_named() -> None:
    async with serve_ops("127.0.0.1:0", METRICS, ready=lambda: True) as ops:
        with pytest.raises(ConfigError, match=f"ops: {ops.address} is already in use"):
            await serve_ops(ops.address, METRICS, ready=lambda: True).__aenter__()


def test_an_event_is_one_line_with_role_and_id() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("prefill/p%0"))
    logger = logging.Logger("baton.test")
    logger.addHandler(handler)
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("it %s", "broke")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert " ERROR prefill/p%0 baton.test: it broke\\nTraceback" in lines[0]
    assert "ValueError: first\\nsecond" in lines[0]


@pytest.mark.parametrize("level", ["debug", "warning"])
def test_grpc_does_not_drown_what_is_logged(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root, grpc, stream = logging.getLogger(), logging.getLogger("grpc"), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    before = root.level, grpc.level
    try:
        configure(level, "prefill", stream=stream)
        for say in (logging.getLogger("grpc._cython"), logging.getLogger("baton")):
            for kind in (logging.DEBUG, logging.INFO, logging.WARNING):
                say.log(kind, "%s", logging.getLevelName(kind))
    finally:
        root.setLevel(before[0])
        grpc.setLevel(before[1])
    said = [line.split(" ")[-2:] for line in stream.getvalue().splitlines()]
    lines = ["INFO", "WARNING", "DEBUG", "INFO", "WARNING"] if level == "debug" else ["WARNING", "WARNING"]
    assert [word for _, word in said] == lines
