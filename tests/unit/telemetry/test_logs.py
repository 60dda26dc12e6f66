"""Log lines name the requests that they are about, as text and as JSON."""

import ast
import io
import json
import logging
from pathlib import Path

import pytest

from baton.telemetry.logs import JsonFormatter, LineFormatter, about, configure

ROOT = Path(__file__).parents[3]


def lines(formatter: logging.Formatter) -> list[str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("baton.test")
    logger.addHandler(handler)
    logger.warning("listening at %s", "h:1")
    logger.warning("%s: a chunk failed", "r1/0", extra=about("r1/0"))
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("a step failed", extra=about("r1/0/context", "r2", "r1"))
    return stream.getvalue().splitlines()


def test_a_json_line_has_role_logger_message_and_requests() -> None:
    plain, one, several = map(json.loads, lines(JsonFormatter("decode", "d-0")))
    assert plain.pop("time").endswith("Z")
    expected = {"level": "WARNING", "role": "decode", "worker_id": "d-0", "logger": "baton.test"}
    assert plain == {**expected, "message": "listening at h:1"}
    assert (one["message"], one["request_id"]) == ("r1/0: a chunk failed", "r1")
    assert several["request_ids"] == ["r1", "r2"]
    assert several["exception"].endswith("ValueError: first\nsecond")
    assert (several["level"], several["message"]) == ("ERROR", "a step failed")


def test_a_text_line_names_each_request_once() -> None:
    plain, one, several = lines(LineFormatter("decode/d-0"))
    assert plain.endswith(" decode/d-0 baton.test: listening at h:1")
    assert one.endswith(": r1/0: a chunk failed")
    assert ": a step failed (request r1, r2)\\nTraceback" in several


def test_the_format_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    before = root.level, logging.getLogger("grpc").level
    try:
        configure("info", "router", stream=stream, log_format="json")
        logging.getLogger("baton").info("ready")
    finally:
        root.setLevel(before[0])
        logging.getLogger("grpc").setLevel(before[1])
    assert json.loads(stream.getvalue())["message"] == "ready"


NAMES = ("request", "job", "attempt", "handle", "sequence", "owner", "batch")
"""Variables in the arguments of a call by which a line is about requests."""


@pytest.mark.parametrize("package", ["baton", "router", "prefill_svc", "decode_svc"])
def test_lines_about_requests_have_their_ids(package: str) -> None:
    missing = []
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("_log.", "_logger."))):
                continue
            used = {name.id for argument in node.args for name in ast.walk(argument) if isinstance(name, ast.Name)}
            if used & set(NAMES) and "extra" not in {keyword.arg for keyword in node.keywords}:
                missing.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not missing
