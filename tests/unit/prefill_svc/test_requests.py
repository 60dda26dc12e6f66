"""Limits of request fields that a prefill worker keeps: longer ones are refused by name."""

from typing import Any

import pytest

from baton.engine.fake import FakeEngine
from baton.errors import InvalidRequest
from baton.pb import kv_pb2, prefill_pb2
from baton.request import SamplingParams
from baton.rpc.convert import sampling_to_proto
from prefill_svc.servicer import request_from_proto
from tests.unread import COUNT, WithUnread

LONG = "x" * (1 << 20)
SPEC = FakeEngine().spec


def request(**changes: Any) -> prefill_pb2.PrefillRequest:
    fields = {
        "request_id": "r",
        "prompt_token_ids": [1, 2],
        "choice_indexes": [0],
        "sampling": sampling_to_proto(SamplingParams(max_tokens=2, temperature=0.0)),
    }
    return prefill_pb2.PrefillRequest(**(fields | changes))


def source(**fields: Any) -> dict[str, Any]:
    return {"prefix_source": prefill_pb2.PrefixSource(export=kv_pb2.RemoteExport(**fields))}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("request_id", {"request_id": LONG}),
        ("transfer_id", {"transfer_id": LONG}),
        ("cache_salt", {"cache_salt": LONG.encode()}),
        ("prefix_source.export.shards.kv_address", source(shards=[kv_pb2.Shard(kv_address=LONG)])),
        ("prefix_source.export.incarnation", source(incarnation=LONG)),
        ("prefix_source.export.transfer_id", source(transfer_id=LONG)),
        ("prefix_source.export.ticket", source(ticket=LONG.encode())),
    ],
)
def test_ids_of_a_caller_are_bounded(field: str, changes: dict[str, Any]) -> None:
    assert request_from_proto(request(), SPEC, None).request_id == "r"
    with pytest.raises(InvalidRequest, match=f"^{field}: must have at most ") as refused:
        request_from_proto(request(**changes), SPEC, None)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    "path", ["prompt_token_ids", "output_token_ids", "choice_indexes", "sampling.allowed_token_ids", "sampling.stop"]
)
def test_a_field_is_counted_before_any_of_it_is_read(path: str) -> None:
    message: Any = WithUnread(request(), path)
    with pytest.raises(InvalidRequest, match=rf"^{path.rpartition('.')[2]}: at most \d+ .*, got {COUNT}$"):
        request_from_proto(message, SPEC, None)
