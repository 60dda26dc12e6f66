"""Both clients against a router that is played by a small servicer, over real sockets."""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from baton import AsyncClient, Client
from baton.errors import Cancelled, ConfigError, DeadlineExceeded, InvalidRequest, NotFound, Overloaded, Unavailable
from baton.pb import inference_pb2 as pb
from baton.request import CachedTokens, CachePolicy, FinishReason, Timings, TokenInfo, Usage
from baton.rpc.calls import ClientCall
from tests.fake_router import Router, served


async def on_thread(address: str, use: Callable[[Client], Any], model: str = "") -> Any:
    def work() -> Any:
        with Client(address, model=model) as client:
            return use(client)

    return await asyncio.to_thread(work)


async def ask(face: str, address: str, use: Callable[[Any], Any]) -> Any:
    """The answer to a call of either client."""
    if face == "sync":
        return await on_thread(address, use)
    async with AsyncClient(address) as client:
        return await use(client)


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_complete_returns_texts_tokens_and_log_probabilities(router: Router, face: str) -> None:
    arguments: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "stop": "b", "logit_bias": {7: 1.0}, "n": 2}
    async with served(router) as listener:
        completion = await ask(face, listener.address, lambda client: client.complete("hello", **arguments))
    assert (completion.text, completion.token_ids) == ("ab", [1, 2])
    assert completion.finish_reason is FinishReason.STOP
    assert completion.choices[0].stop == "b"
    assert completion.logprobs[0] == TokenInfo(1, -0.5, ((1, -0.5),))  # type: ignore[index]
    assert (completion.choices[1].text, completion.choices[1].finish_reason) == ("xy", FinishReason.LENGTH)
    assert completion.choices[1].logprobs is None
    assert completion.prompt_tokens == [TokenInfo(9)]
    assert completion.usage == Usage(3, 2, 3, CachedTokens(pool=1, redis=1, decode=2))
    assert completion.timings_ms == Timings(1, 0, 0, 0, 0, 5, 0, 0)
    request = router.seen[0]
    assert request.text == "hello"
    assert (request.sampling.max_tokens, request.sampling.temperature) == (4, 0.0)
    assert list(request.sampling.stop) == ["b"]
    assert dict(request.sampling.logit_bias) == {7: 1.0}


async def test_the_three_forms_of_a_prompt(router: Router) -> None:
    async with served(router) as listener, AsyncClient(listener.address) as client:
        await client.complete([1, 2, 3])
        await client.complete([{"role": "user", "content": "hi"}])
        await client.complete("")
    assert list(router.seen[0].token_ids.ids) == [1, 2, 3]
    assert router.seen[1].chat.messages[0].content == "hi"
    assert router.seen[2].WhichOneof("prompt") == "text"


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_variables_of_the_chat_template_go_with_messages(router: Router, face: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    given = {"enable_thinking": False, "name": "é", "count": 2**60, "nothing": None}
    async with served(router) as listener:
        await ask(face, listener.address, lambda c: c.complete(messages, chat_template_kwargs=given))
        await ask(face, listener.address, lambda c: c.complete(messages, chat_template_kwargs={}))
    assert [json.loads(request.chat.chat_template_kwargs) for request in router.seen] == [given, {}]


@pytest.mark.parametrize(
    ("prompt", "given", "words"),
    [
        ("x", {"a": 1}, "^chat_template_kwargs: can be set for messages only$"),
        ([1], {}, "^chat_template_kwargs: can be set for messages only$"),
        (None, [1], "^chat_template_kwargs: must be a mapping of names to values, got "),
        (None, {1: 1}, "^chat_template_kwargs: a name must be text, got 1$"),
        (None, {"messages": 1}, "^chat_template_kwargs.messages: can't be set"),
        (None, {"x": [1]}, "^chat_template_kwargs.x: must be a number, a text, true, false or null, not list$"),
        (None, {"x": 10**5000}, "^chat_template_kwargs: can't be written as JSON: "),
        (None, {"x": "\ud800"}, "^chat_template_kwargs.x: not valid Unicode"),
        (None, {"x" * (1 << 16): 1}, "^chat_template_kwargs: must have at most 65536 characters, got "),
        (None, {"x": "x" * 1001}, "^chat_template_kwargs.x: must have at most 1000 characters, got 1001$"),
        (None, {f"x{n}": 1 for n in range(33)}, "^chat_template_kwargs: at most 32 names are allowed, got 33$"),
    ],
)
def test_wrong_variables_of_the_chat_template_are_refused(prompt: Any, given: Any, words: str) -> None:
    asked = [{"role": "user", "content": "hi"}] if prompt is None else prompt
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=words):
        client.generate(asked, chat_template_kwargs=given)


async def test_a_very_long_prompt_travels_in_fixed_width(router: Router) -> None:
    async with served(router) as listener, AsyncClient(listener.address) as client:
        await client.complete([5] * 70_000)
    assert list(router.seen[0].token_ids.long_ids) == [5] * 70_000
    assert not router.seen[0].token_ids.ids


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_a_request_says_how_the_cache_is_used(router: Router, face: str) -> None:
    async with served(router) as listener:
        for cache, salt in ((CachePolicy.READ, "a"), ("off", "é" * 128)):
            await ask(face, listener.address, lambda c, a=cache, b=salt: c.complete("x", cache=a, cache_salt=b))
        await ask(face, listener.address, lambda client: client.complete("x"))
    seen = [(request.cache, request.cache_salt) for request in router.seen]
    plain = (pb.CACHE_POLICY_READ_WRITE, "")
    assert seen == [(pb.CACHE_POLICY_READ, "a"), (pb.CACHE_POLICY_OFF, "é" * 128), plain]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cache": "never"}, "^cache: must be one of read_write, read, write, off, got 'never'$"),
        ({"cache": None}, "^cache: must be one of .*, got None$"),
        ({"report_progress": "yes"}, "^report_progress: must be true or false, got 'yes'$"),
        ({"cache_salt": b"x"}, "^cache_salt: must be text, got b'x'$"),
        ({"cache_salt": "é" * 129}, "^cache_salt: may have at most 256 bytes, got 258$"),
    ],
)
async def test_wrong_arguments_for_the_cache_or_progress_are_refused(arguments: dict[str, Any], words: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=words):
        client.generate("x", **arguments)


def test_an_unknown_argument_is_named() -> None:
    for unknown, words in {
        "max_token": "did you mean max_tokens or min_tokens?",
        "include_stop_str_in_output": "did you mean include_stop_in_output?",
        "time_out": "did you mean timeout?",
        "model": "it is an argument of the client",
        "quantity": "",
    }.items():
        named = f"have no argument {unknown!r}" + (f"; {words}" if words else "")
        with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=f"{re.escape(named)}$"):
            client.generate("x", **{unknown: 1})


@pytest.mark.parametrize("target", ["127.0.0.1", "http://127.0.0.1:50050", "", ":50050", "router:port", None])
@pytest.mark.parametrize("client", [Client, AsyncClient])
async def test_a_target_without_a_port_is_refused_at_once(client: Any, target: Any) -> None:
    with pytest.raises(ConfigError, match=r"^target: must be HOST:PORT"):
        client(target)


@pytest.mark.parametrize("target", ["router:1", "[::1]:1", "dns:///router.baton.svc:1", "unix:/run/baton.sock"])
def test_a_target_may_be_any_name_of_grpc(target: str) -> None:
    Client(target).close()


async def test_an_argument_of_none_equals_an_omitted_one(router: Router) -> None:
    async with served(router) as listener, AsyncClient(listener.address) as client:
        await client.complete("x", stop=None, stop_token_ids=None, allowed_token_ids=None, logit_bias=None, seed=None)
        await client.complete("x")
    assert router.seen[0] == router.seen[1]
    # So that the router can take the model's own.
    assert not router.seen[0].sampling.ListFields()


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_tokenize_detokenize_model_and_health_answer(router: Router, face: str) -> None:
    async with served(router) as listener:
        calls: list[Callable[[Any], Any]] = [
            lambda client: client.tokenize("x", add_special_tokens=False),
            lambda client: client.detokenize([5, 6]),
            lambda client: client.get_model(),
            lambda client: client.health(),
        ]
        *answers, model, healthy = [await ask(face, listener.address, call) for call in calls]
        listener.set_serving(False)
        assert await on_thread(listener.address, lambda client: client.health()) is False
    assert (answers, model.name, healthy) == ([[5, 6], "hé"], "tiny", True)
    assert router.seen[0].add_special_tokens is False


async def test_leaving_the_loop_cancels_async(router: Router) -> None:
    router.hang = True
    async with served(router) as listener, AsyncClient(listener.address) as client:
        async for delta in client.generate("x"):
            assert delta.text == "a"
            break
        await asyncio.wait_for(router.closed.wait(), 60)


async def test_leaving_the_loop_cancels_sync(router: Router) -> None:
    router.hang = True

    def use(client: Client) -> None:
        for _ in client.generate("x"):
            break
        asyncio.run_coroutine_threadsafe(asyncio.wait_for(router.closed.wait(), 60), loop).result()

    loop = asyncio.get_running_loop()
    async with served(router) as listener:
        await on_thread(listener.address, use)
    assert router.closed.is_set()


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_the_deadline_ends_the_request_on_both_sides(router: Router, face: str) -> None:
    router.hang = True
    async with served(router) as listener:
        with pytest.raises(DeadlineExceeded, match=r"^the deadline of 1 s passed after 1 token$"):
            await ask(face, listener.address, lambda client: client.complete("x", timeout=1))
        await asyncio.wait_for(router.closed.wait(), 60)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 1e300, "5"])
async def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    words = rf"^timeout: must be a number of at most \d+ seconds, got {re.escape(repr(timeout))}$"
    with Client("127.0.0.1:1") as client:
        for ask in (client.get_model, lambda timeout: client.generate("x", timeout=timeout)):
            with pytest.raises(InvalidRequest, match=words):
                ask(timeout=timeout)
    async with AsyncClient("127.0.0.1:1") as other:
        with pytest.raises(InvalidRequest, match=words):
            await other.get_model(timeout=timeout)
        with pytest.raises(InvalidRequest, match=words):
            other.generate("x", timeout=timeout)


async def test_refusals_keep_their_class(router: Router) -> None:
    router.error = Overloaded("the queue holds 64 of 64", retry_after=1.5)
    async with served(router) as listener:
        async with AsyncClient(listener.address, model="other") as client:
            with pytest.raises(Overloaded, match="64 of 64") as caught:
                await client.complete("x")
            assert caught.value.retry_after == 1.5
            with pytest.raises(NotFound, match="other"):
                await client.get_model()
        with pytest.raises(Overloaded, match="64 of 64"):
            await on_thread(listener.address, lambda client: client.complete("x"))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "127.0.0.1:1",
            r"cannot connect to 127.0.0.1:1: connection refused; check the address, and that the process runs",
        ),
        ("[::1]:1", r"cannot connect to \[::1\]:1: [a-z ]+; check the address, and that the process runs"),
        ("nobody.invalid:1", r"cannot find the host of nobody.invalid:1; check the address"),
    ],
)
async def test_an_unreachable_router_is_unavailable(target: str, words: str) -> None:
    async with AsyncClient(target) as client:
        with pytest.raises(Unavailable, match=f"^{words}$"):
            await client.complete("x", timeout=60)


@pytest.mark.parametrize(
    ("prompt", "sampling", "field", "seen"),
    [
        ("x" * (200 << 20), {}, "prompt", str(200 << 20)),
        (range(70 << 20), {}, "prompt", str(70 << 20)),
        ("bad \ud800", {}, "prompt", "character 4"),
        ([1, -5], {}, "token_ids[1]", "-5"),
        ([1, 2**32], {}, "token_ids[1]", str(2**32)),
        (["a", "b"], {}, "prompt", "'a'"),
        ([1, True], {}, "prompt", "True"),
        (b"bytes", {}, "prompt", "b'bytes'"),
        (5, {}, "prompt", "5"),
        ([{"role": "user"}], {}, "prompt[0]", "role"),
        ([{"role": "user", "content": 3}], {}, "prompt[0].content", "3"),
        ("x", {"temperature": float("nan")}, "temperature", "nan"),
        ("x", {"top_p": 2}, "top_p", "2"),
        ("x", {"stop": ["s"] * 10_000}, "stop", "10000"),
        ("x", {"stop_token_ids": [-1]}, "stop_token_ids[0]", "-1"),
        ("x", {"max_tokens": 0}, "max_tokens", "0"),
        (None, {}, "prompt", "None"),
        ([{"role": "user", "content": None}], {}, "prompt[0].content", "None"),
        ("x", {"temperature": "0"}, "temperature", "'0'"),
        ("x", {"temperature": None}, "temperature", "None"),
        ("x", {"max_tokens": 1.5}, "max_tokens", "1.5"),
        ("x", {"min_tokens": None}, "min_tokens", "None"),
        ("x", {"ignore_eos": "no"}, "ignore_eos", "'no'"),
        ("x", {"stop": 5}, "stop", "must be a text or a sequence of texts, got 5"),
        ("x", {"stop": [5]}, "stop[0]", "5"),
        ("x", {"stop_token_ids": [1, 2.5]}, "stop_token_ids[1]", "2.5"),
        ("x", {"logit_bias": [5]}, "logit_bias", "[5]"),
        ("x", {"logit_bias": {"5": 1.0}}, "logit_bias", "must have integers, token ids, as keys, got {'5': 1.0}"),
        ("x", {"logit_bias": {5: "1"}}, "logit_bias[5]", "'1'"),
        ("x", {"logit_bias": {5: 200.0}}, "logit_bias[5]", "200.0"),
        ("x", {"logit_bias": {-5: 1.0}}, "logit_bias[-5]", "-5"),
    ],
)
async def test_a_request_that_can_only_be_refused_is_not_sent(
    prompt: Any, sampling: Any, field: str, seen: str
) -> None:
    with contextlib.closing(Client("127.0.0.1:1")) as client, pytest.raises(InvalidRequest) as caught:
        client.generate(prompt, **sampling)
    assert caught.value.field == field
    assert seen in str(caught.value)
    assert len(str(caught.value)) < 400


async def test_an_unknown_keyword_is_named_with_the_methods_that_lack_it() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=r"^generate\(\) and complete\(\) .* 'top'; "):
        client.complete("x", top=5)  # type: ignore[call-arg]


async def test_a_closed_client_says_so() -> None:
    client, without_async = AsyncClient("127.0.0.1:1"), Client("127.0.0.1:1")
    await client.close()
    without_async.close()
    for use in (client.complete("x"), client.get_model()):
        with pytest.raises(Unavailable, match=r"^the client is closed$"):
            await use
    for call in (without_async.complete, without_async.tokenize):
        with pytest.raises(Unavailable, match=r"^the client is closed$"):
            call("x")


def test_a_request_that_a_stopping_router_does_not_serve_is_unavailable() -> None:
    nothing = grpc.aio.Metadata()
    by_grpc, by_router = (
        grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, details)
        for details in ("CANCELLED", "the caller left")
    )
    call = ClientCall("r:1", None, None)
    assert isinstance(call.to_error(by_router), Cancelled)
    error = call.to_error(by_grpc)
    assert isinstance(error, Unavailable)
    assert str(error) == "the server stops, and does not serve the call; send it again"
