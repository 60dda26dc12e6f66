"""The registration of a router's public API."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from baton.errors import InvalidRequest
from baton.pb import inference_pb2
from router.serving.servicer import SERVICE, InferenceServicer, Sized, generate_request
from router.serving.validator import TokenPrompt


async def test_every_method_of_the_service_is_registered() -> None:
    server = Mock()
    InferenceServicer(Mock()).add_to_server(server)
    ((handlers,),) = server.add_generic_rpc_handlers.call_args.args
    for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods:
        assert handlers.service(SimpleNamespace(method=f"/{SERVICE}/{method.name}")) is not None, method.name


def test_token_ids_come_in_one_of_two_widths() -> None:
    for ids in (inference_pb2.TokenIds(ids=[1, 2]), inference_pb2.TokenIds(long_ids=[1, 2])):
        prompt = generate_request(Sized(inference_pb2.GenerateRequest(token_ids=ids), 1)).prompt
        assert isinstance(prompt, TokenPrompt)
        assert list(prompt.token_ids) == [1, 2]
    both = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1], long_ids=[1]))
    with pytest.raises(InvalidRequest, match="token_ids: ids and long_ids can't both be set"):
        generate_request(Sized(both, 1))
