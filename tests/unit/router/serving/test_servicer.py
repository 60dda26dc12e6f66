"""The registration of a router's public API."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

from baton.pb import inference_pb2
from router.serving.servicer import SERVICE, InferenceServicer


async def test_every_method_of_the_service_is_registered() -> None:
    server = Mock()
    InferenceServicer(Mock()).add_to_server(server)
    ((handlers,),) = server.add_generic_rpc_handlers.call_args.args
    for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods:
        assert handlers.service(SimpleNamespace(method=f"/{SERVICE}/{method.name}")) is not None, method.name
