"""A prefill worker's listeners against bytes and messages that make no sense.

Each call ends, in time, with a status that blames the caller; the worker is healthy afterwards and holds nothing.
"""

import grpc

from baton.pb import kv_pb2, prefill_pb2
from baton.rpc.channel import control_channel
from baton.rpc.convert import sampling_to_proto
from tests.fuzz.storm import LEDGER, WATCH, Method, call, calls, hang_ups, healthy, kv_methods
from tests.prefill import GREEDY, serving

PREFILL = (
    Method(
        "/baton.v1.Prefill/Prefill",
        True,
        prefill_pb2.PrefillRequest(
            request_id="r", prompt_token_ids=range(40), choice_indexes=[0], sampling=sampling_to_proto(GREEDY)
        ),
    ),
    Method("/baton.v1.Prefill/Abandon", False, prefill_pb2.AbandonRequest(transfer_id="t")),
    WATCH,
    LEDGER,
)


async def test_prefill_blames_the_caller() -> None:
    # KV prefilled for a transfer is held until nobody has asked for it in time.
    async with serving(lease_s=0.5) as client:
        addresses = client.app.addresses
        await calls("Prefill, Watch, Ledger", 300, addresses.control, PREFILL)
        await client.pages_back()


async def test_kv_blames_the_caller() -> None:
    async with serving() as client:
        incarnation = client.app.status.identity.incarnation
        for number in range(3):
            await client.done(transfer_id=f"t{number}")
        names, kv, methods = ["t0", "t1", "t2", incarnation], client.app.addresses.kv, kv_methods(incarnation)
        # First without releases, after which there is little to be asked for.
        await calls("FetchKv", 100, kv, methods[:1], names)
        await calls("FetchKv, ReleaseKv", 60, kv, methods, names)
        async with control_channel(client.app.addresses.kv) as channel:
            for name in names[:3]:
                release = kv_pb2.ReleaseKvRequest(transfer_id=name, incarnation=incarnation)
                method = Method("/baton.v1.Kv/ReleaseKv", False, release)
                ended = await call(channel, method, release.SerializeToString())
                assert ended.code is grpc.StatusCode.OK
        await client.pages_back()


async def test_prefill_survives_garbage_on_its_sockets() -> None:
    async with serving() as client:
        addresses = client.app.addresses
        await hang_ups("sockets of a prefill worker", 120, [addresses.control, addresses.kv, addresses.ops])
        assert await healthy(addresses.control)
        assert await healthy(addresses.kv)
        assert (await client.done()).first_tokens
