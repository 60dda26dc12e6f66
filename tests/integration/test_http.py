"""The HTTP API on real sockets: clients of OpenAI, the same output as over gRPC, errors, and what is left behind."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton import AsyncClient, bundled
from baton.completion import Choice, Completion
from baton.pb import admin_pb2, admin_pb2_grpc
from baton.rpc.channel import control_channel
from router.serving.http_requests import REFUSED, WITHOUT_EFFECT
from tests.fleet import Fleet, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 60
TEXT = "def read(self, size=-1):\n    if self.closed:"
CHAT = [{"role": "user", "content": "Write a function that closes a file."}]


@dataclass
class Http:
    app: Any
    grpc: AsyncClient
    openai: openai.AsyncOpenAI
    plain: httpx2.AsyncClient

    @property
    def host(self) -> tuple[str, int]:
        host, port = self.app.http_address.split(":")
        return host, int(port)

    async def ledger_is_empty(self) -> None:
        """Return when no request has anything any more."""
        async with asyncio.timeout(WAIT_S), control_channel(self.app.address) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            await self.app._door._idle.wait()
            while (await admin.Ledger(admin_pb2.LedgerRequest())).entries:
                pass


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[Http]:
    async with Fleet(bundled.path(), dtype="float32") as fleet:
        workers = [await fleet.prefill()], [await fleet.decode()]
        app = await fleet.start_router(*workers, http="127.0.0.1:0", http_origins=("https://page.example",))
        await serving(app.address)
        base = f"http://{app.http_address}"
        async with (
            openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client,
            httpx2.AsyncClient(base_url=base, timeout=WAIT_S) as plain,
        ):
            made = Http(app, await fleet.client(app), client, plain)
            yield made
            await made.ledger_is_empty()


async def threaded(http: Http, check: Callable[[Callable[[Awaitable[Any]], Any]], None]) -> None:
    """Run a test with many examples on a thread; it gets a function that runs a coroutine here."""
    loop = asyncio.get_running_loop()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)

    await asyncio.to_thread(check, run)


# Clients of OpenAI


async def test_the_client_of_openai_completes_and_streams(http: Http) -> None:
    expected = await http.grpc.complete(TEXT, max_tokens=18, temperature=0)
    done = await http.openai.completions.create(model="m", prompt=TEXT, max_tokens=18, temperature=0)
    assert (done.object, done.model, done.choices[0].finish_reason) == ("text_completion", "m", "length")
    assert done.choices[0].text == expected.text
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (16, 18, 34)
    assert done.usage.prompt_tokens_details.cached_tokens is not None
    stream = await http.openai.completions.create(
        model="m", prompt=TEXT, max_tokens=18, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected.text
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 18)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_the_client_of_openai_chats(http: Http) -> None:
    expected = await http.grpc.complete(CHAT, max_tokens=12, temperature=0, n=2)
    asked: dict[str, Any] = {"model": "m", "messages": CHAT, "max_completion_tokens": 12, "temperature": 0, "n": 2}
    done = await http.openai.chat.completions.create(**asked)
    assert [choice.message.content for choice in done.choices] == [choice.text for choice in expected.choices]
    assert (done.object, done.choices[0].message.role) == ("chat.completion", "assistant")
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await http.openai.chat.completions.create(**asked, stream=True, stream_options=options)
    texts, counts = ["", ""], [0]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        counts.append(chunk.usage.completion_tokens)
    assert texts == [choice.text for choice in expected.choices]
    assert (counts, counts[-1]) == (sorted(counts), 24)
    parts = [{"type": "text", "text": "Write a function"}, {"type": "text", "text": "that closes a file."}]
    joined = [{"role": "user", "content": "Write a function\nthat closes a file."}]
    done = await http.openai.chat.completions.create(**asked | {"messages": [{"role": "user", "content": parts}]})
    assert done.choices[0].message.content == (await http.grpc.complete(joined, max_tokens=12, temperature=0)).text


async def test_the_sync_client_of_openai(http: Http) -> None:
    def use() -> str:
        with openai.OpenAI(base_url=str(http.openai.base_url), api_key="none", timeout=WAIT_S) as client:
            assert [model.id for model in client.models.list()] == ["m"]
            assert client.models.retrieve("m").max_model_len == 2048  # type: ignore[attr-defined]
            with pytest.raises(openai.NotFoundError, match="'other' is not served") as refused:
                client.models.retrieve("other")
            assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
            stream = client.chat.completions.create(
                model="m", messages=CHAT, max_tokens=12, temperature=0, stop=["("], stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(use) == "def close"


# The same output as over gRPC

PROMPTS = st.sampled_from([TEXT, "x = 1\n", "größe 日本", [5, 6, 7], list(range(300, 340)), CHAT])
PENALTY = st.sampled_from([None, 0.5, -1.0])
PARAMETERS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 1.3]),
        "top_p": st.sampled_from([0.3, 0.9, 1]),
        "top_k": st.integers(0, 40),
        "min_p": st.sampled_from([0.05, 0.3]),
        "repetition_penalty": st.sampled_from([0.8, 1.2]),
        "presence_penalty": st.sampled_from([0.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.5, -1.0]),
        "logit_bias": st.dictionaries(st.integers(0, 4095), st.floats(-100, 100, width=32), max_size=3),
        "stop": st.sampled_from(["\n", ["self", "e"], "größe"]),
        "stop_token_ids": st.lists(st.integers(200, 400), max_size=40),
        "allowed_token_ids": st.lists(st.integers(0, 4095), min_size=1, max_size=30),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 3),
        "skip_special_tokens": st.booleans(),
        "include_stop_in_output": st.booleans(),
        "logprobs": st.integers(0, 3),
    },
)
RENAMED = {"include_stop_in_output": "include_stop_str_in_output"}


def body_of(prompt: Any, parameters: dict[str, Any], *, stream: bool) -> tuple[str, dict[str, Any]]:
    body = {RENAMED.get(name, name): value for name, value in parameters.items()}
    body |= {"stream": stream, "return_token_ids": True, "return_tokens_as_token_ids": True}
    if prompt is not CHAT:
        return "/v1/completions", body | {"prompt": prompt}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return "/v1/chat/completions", body | {"messages": prompt}


async def answered(http: Http, prompt: Any, parameters: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """The choices of an answer, of a stream put together."""
    path, body = body_of(prompt, parameters, stream=stream)
    if not stream:
        response = await http.plain.post(path, json=body)
        assert response.status_code == 200, response.text
        found = response.json()["choices"]
        return [{**each, "text": each["text"] if "text" in each else each["message"]["content"]} for each in found]
    choices: dict[int, dict[str, Any]] = {}
    async with http.plain.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    for event in map(json.loads, lines[:-1]):
        (delta,) = event["choices"]
        found = choices.setdefault(delta["index"], {"text": "", "token_ids": [], "logprobs": None})
        found["text"] += delta["text"] if "text" in delta else delta["delta"]["content"]
        found["token_ids"] += delta.get("token_ids", [])
        found["finish_reason"], found["stop_reason"] = delta["finish_reason"], delta.get("stop_reason")
        for name, values in (delta["logprobs"] or {}).items():
            found["logprobs"] = found["logprobs"] or {}
            found["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


def reported(choice: Choice, *, chat: bool) -> Any:
    """The log-probabilities of a choice as HTTP reports them, with ids for tokens; nothing for no report."""
    name = "token_id:{}".format
    if chat:
        return [
            (name(each.token_id), each.logprob, [(name(top), logprob) for top, logprob in each.top])
            for each in choice.tokens
        ]
    return [
        (name(each.token_id), each.logprob, {name(top): p for top, p in each.top} | {name(each.token_id): each.logprob})
        for each in choice.tokens
    ]


def seen(logprobs: Any) -> Any:
    if "content" in logprobs:
        entries = logprobs["content"]
        return [
            (each["token"], each["logprob"], [(top["token"], top["logprob"]) for top in each["top_logprobs"]])
            for each in entries
        ]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))


def same(expected: Completion, found: list[dict[str, Any]], asked: dict[str, Any], *, chat: bool) -> None:
    assert [choice["text"] for choice in found] == [choice.text for choice in expected.choices]
    assert [choice["token_ids"] for choice in found] == [choice.token_ids for choice in expected.choices]
    assert [choice["finish_reason"] for choice in found] == [choice.finish_reason.value for choice in expected.choices]
    for ours, theirs in zip(found, expected.choices, strict=True):
        requested = isinstance(theirs.stop, str) or theirs.stop in asked.get("stop_token_ids", ())
        assert ours["stop_reason"] == (theirs.stop if requested else None)
        if "logprobs" in asked:
            assert seen(ours["logprobs"]) == reported(theirs, chat=chat)
        else:
            assert ours["logprobs"] is None


async def test_output_is_the_same_as_over_grpc(http: Http) -> None:
    def check(run: Callable[[Awaitable[Any]], Any]) -> None:
        @settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
        @example(CHAT, {"max_tokens": 6, "seed": 3, "logprobs": 2, "n": 2, "min_tokens": 4})
        @example(TEXT, {"max_tokens": 6, "seed": 2**64 - 1, "logprobs": 0, "stop": ["Error"]})
        @given(PROMPTS, PARAMETERS)
        def examples(prompt: Any, parameters: dict[str, Any]) -> None:
            async def all_ways() -> tuple[Any, ...]:
                return await asyncio.gather(
                    http.grpc.complete(prompt, timeout=WAIT_S, **parameters),
                    answered(http, prompt, parameters, stream=False),
                    answered(http, prompt, parameters, stream=True),
                )

            expected, whole, streamed = run(all_ways())
            for found in (whole, streamed):
                same(expected, found, parameters, chat=prompt is CHAT)

        examples()

    await threaded(http, check)


async def test_prompts_are_echoed_with_their_log_probabilities(http: Http) -> None:
    """As lm-eval asks for them: the greedy token has the highest value, to the last bit."""
    ids = (await http.plain.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]
    expected = await http.grpc.complete(ids, max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    ask = {"prompt": [ids, ids[:4]], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    whole = (await http.plain.post("/v1/completions", json=ask)).json()
    tokens = [*expected.prompt_tokens, *expected.choices[0].tokens]
    first, second = (choice["logprobs"] for choice in whole["choices"])
    assert first["token_logprobs"] == [token.logprob for token in tokens]
    assert first["token_logprobs"][0] is first["top_logprobs"][0] is None
    for top, token in zip(first["top_logprobs"][1:], tokens[1:], strict=True):
        assert max(top.values()) == token.top[0][1]
    assert whole["choices"][0]["text"].endswith(TEXT + expected.text)
    assert second["token_logprobs"][:4] == pytest.approx(first["token_logprobs"][:4], abs=1e-4)
    assert first["text_offset"] == [sum(map(len, first["tokens"][:i])) for i in range(len(ids) + 1)]
    for stream in (False, True):
        (choice,) = await answered(http, TEXT, {"max_tokens": 0, "echo": True, "logprobs": 0}, stream=stream)
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (TEXT, [], "length")
        assert choice["logprobs"]["token_logprobs"] == [token.logprob for token in expected.prompt_tokens]
    (choice,) = await answered(http, TEXT, {"max_tokens": 0, "echo": True}, stream=True)
    assert choice["text"] == TEXT
    usage = (await http.plain.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 0, "echo": True})).json()
    assert usage["usage"]["completion_tokens"] == 0
    asked = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    report = (await http.plain.post("/v1/completions", json=asked)).json()["choices"][0]["prompt_logprobs"]
    assert report[0] is None
    for entry, token in zip(report[1:], expected.prompt_tokens[1:], strict=True):
        assert entry[str(token.token_id)]["logprob"] == token.logprob
        assert entry[str(token.top[0][0])] | {"decoded_token": ""} == {
            "logprob": token.top[0][1],
            "rank": 1,
            "decoded_token": "",
        }


async def test_prompts_of_a_batch_are_served_beside_each_other(http: Http) -> None:
    prompts = [TEXT, [5, 6, 7], "x = 1\n"]
    asked: dict[str, Any] = {"max_tokens": 5, "n": 2, "seed": 7}
    expected = [await http.grpc.complete(prompt, **asked) for prompt in prompts]
    for stream in (False, True):
        found = await answered(http, prompts, asked, stream=stream)
        for index, each in enumerate(expected):
            same(each, found[2 * index : 2 * index + 2], asked, chat=False)
    done = await http.openai.completions.create(model="m", prompt=prompts, **asked)
    assert done.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in expected)
    assert done.usage.completion_tokens == sum(each.usage.completion_tokens for each in expected)


# Tokens, models and health


async def test_texts_are_tokenized_and_back(http: Http) -> None:
    found = (await http.plain.post("/tokenize", json={"prompt": "import os", "return_token_strs": True})).json()
    assert found["tokens"] == list(await http.grpc.tokenize("import os"))
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 2048)
    assert found["token_strs"][1:] == ["import", " os"]
    chat = (await http.plain.post("/tokenize", json={"messages": CHAT})).json()
    assert chat["tokens"] == list(await http.grpc.tokenize(CHAT))
    bare = {"messages": CHAT, "chat_template_kwargs": {"bos_token": "", "enable_thinking": False}}
    assert (await http.plain.post("/tokenize", json=bare)).json()["tokens"] == chat["tokens"][1:]
    assert await http.grpc.tokenize(CHAT, chat_template_kwargs={"bos_token": ""}) == chat["tokens"][1:]
    text = (await http.plain.post("/detokenize", json={"tokens": found["tokens"]})).json()["prompt"]
    assert text == "<|begin_of_text|>import os"
    info = (await http.plain.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert "im_start" in info["chat_template"]
    assert set((await http.plain.get("/version")).json()) == {"version"}
    assert (await http.plain.get("/health")).status_code == 200


# Refusals


async def refusal(http: Http, body: Any, path: str = "/v1/completions") -> dict[str, Any]:
    response = await http.plain.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert str(error["message"]).startswith(f"{error['param']}: ")
    return dict(error)


CHATTED = {"messages": CHAT, "max_tokens": 1}
BAD: list[tuple[str, str, Any]] = [
    ("/v1/completions", "top_p", {"prompt": "x", "top_p": 2}),
    ("/v1/completions", "temperature", {"prompt": "x", "temperature": "warm"}),
    ("/v1/completions", "max_tokens", {"prompt": "x", "max_tokens": 0}),
    ("/v1/completions", "max_tokens", {"prompt": "x", "max_tokens": 4000}),
    ("/v1/completions", "n", {"prompt": "x", "n": 65}),
    ("/v1/completions", "logprobs", {"prompt": "x", "logprobs": 21}),
    ("/v1/completions", "logprobs", {"prompt": "x", "logprobs": 21, "echo": True}),
    ("/v1/completions", "prompt_logprobs", {"prompt": "x", "prompt_logprobs": 21}),
    ("/v1/completions", "prompt_logprobs", {"prompt": "x", "prompt_logprobs": 1, "stream": True}),
    ("/v1/completions", "stream_options", {"prompt": "x", "stream_options": {"include_usage": True}}),
    ("/v1/completions", "stream_options.x", {"prompt": "x", "stream": True, "stream_options": {"x": 1}}),
    ("/v1/completions", "include_stop_str_in_output", {"prompt": "x", "include_stop_str_in_output": "maybe"}),
    ("/v1/completions", "stop", {"prompt": "x", "stop": ["x"] * 65}),
    ("/v1/completions", "stop[1]", {"prompt": "x", "stop": ["x", ""]}),
    ("/v1/completions", "stop_token_ids[0]", {"prompt": "x", "stop_token_ids": [9999]}),
    ("/v1/completions", "allowed_token_ids", {"prompt": "x", "allowed_token_ids": [1] * 5000}),
    ("/v1/completions", "allowed_token_ids[1]", {"prompt": "x", "allowed_token_ids": [1, "a"]}),
    ("/v1/completions", "logit_bias[9999]", {"prompt": "x", "logit_bias": {"9999": 1}}),
    ("/v1/completions", "cache_salt", {"prompt": "x", "cache_salt": "x" * 257}),
    ("/v1/completions", "nothing", {"prompt": "x", "nothing": 1}),
    ("/v1/completions", "prompt", {}),
    ("/v1/completions", "prompt", {"prompt": ""}),
    ("/v1/completions", "prompt", {"prompt": []}),
    ("/v1/completions", "prompt", {"prompt": {"text": "x"}}),
    ("/v1/completions", "prompt", {"prompt": ["x"] * 257}),
    ("/v1/completions", "prompt[1]", {"prompt": ["x", None]}),
    ("/v1/completions", "prompt[1]", {"prompt": ["x", ""]}),
    ("/v1/completions", "prompt[1][2]", {"prompt": [[1], [1, 2, 4096]]}),
    ("/v1/completions", "prompt[2]", {"prompt": [1, 2, -3]}),
    ("/v1/completions", "body", b""),
    ("/v1/completions", "body", b"[]"),
    ("/v1/completions", "body", b'{"prompt": "x"'),
    ("/v1/completions", "body", b'{"prompt": "\\ud800"}'),
    ("/v1/completions", "body", b'{"prompt": "\xff"}'),
    ("/v1/completions", "body", b'{"temperature": NaN}'),
    ("/v1/completions", "body", b"[" * 5000),
    ("/v1/chat/completions", "messages", {}),
    ("/v1/chat/completions", "messages", {"messages": []}),
    ("/v1/chat/completions", "messages", {"messages": "x"}),
    ("/v1/chat/completions", "messages[0]", {"messages": ["x"]}),
    ("/v1/chat/completions", "messages[0].role", {"messages": [{"content": "x"}]}),
    ("/v1/chat/completions", "messages[0].role", {"messages": [{"role": "r" * 65, "content": "x"}]}),
    ("/v1/chat/completions", "messages[0].content", {"messages": [{"role": "user", "content": 1}]}),
    ("/v1/chat/completions", "messages[0].tool_calls", {"messages": [{"role": "user", "tool_calls": [1]}]}),
    (
        "/v1/chat/completions",
        "messages[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ),
    ("/v1/chat/completions", "top_logprobs", CHATTED | {"top_logprobs": 2}),
    ("/v1/chat/completions", "top_logprobs", CHATTED | {"logprobs": True, "top_logprobs": 21}),
    ("/v1/chat/completions", "max_completion_tokens", {"messages": CHAT, "max_completion_tokens": 4000}),
    ("/v1/chat/completions", "echo", CHATTED | {"echo": True}),
    ("/v1/chat/completions", "chat_template_kwargs", CHATTED | {"chat_template_kwargs": [1]}),
    ("/tokenize", "chat_template_kwargs", {"messages": CHAT, "chat_template_kwargs": {f"x{n}": 1 for n in range(33)}}),
    ("/v1/chat/completions", "chat_template_kwargs.messages", CHATTED | {"chat_template_kwargs": {"messages": 1}}),
    ("/v1/chat/completions", "chat_template_kwargs.x", CHATTED | {"chat_template_kwargs": {"x": [1]}}),
    ("/tokenize", "chat_template_kwargs.x", {"messages": CHAT, "chat_template_kwargs": {"x": "x" * 1001}}),
    ("/tokenize", "prompt", {}),
    ("/tokenize", "prompt", {"prompt": "x", "messages": CHAT}),
    ("/detokenize", "tokens", {"tokens": "x"}),
    ("/detokenize", "tokens[1]", {"tokens": [1, 4096]}),
]


async def test_a_refused_field_is_named(http: Http) -> None:
    for path, field, body in BAD:
        assert (await refusal(http, body, path))["param"] == field, (path, field, body)
    for name in REFUSED:
        for path, body in (("/v1/completions", {"prompt": "x", "max_tokens": 1}), ("/v1/chat/completions", CHATTED)):
            if name != "echo":
                assert (await refusal(http, {**body, name: {"type": "x"}}, path))["param"] == name


async def test_fields_without_effect_and_values_that_ask_for_nothing_are_accepted(http: Http) -> None:
    nothing = {name: values[0] if values else None for name, values in REFUSED.items()}
    for path, body in (("/v1/completions", {"prompt": "x", "max_tokens": 1}), ("/v1/chat/completions", CHATTED)):
        more = {**nothing, **dict.fromkeys(WITHOUT_EFFECT, "x"), "model": None, "stop": None, "top_k": -1}
        response = await http.plain.post(path, json={**body, **more})
        assert response.status_code == 200, response.text


NAMES = [
    "prompt",
    "messages",
    "stop",
    "n",
    "temperature",
    "logit_bias",
    "allowed_token_ids",
    "stream_options",
    "tokens",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.sampled_from(NAMES), inner),
    max_leaves=8,
)
ROLES = st.sampled_from(["role", "content", "type", "text", "name", "tool_calls"])
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])


async def test_malformed_requests_are_the_callers_fault_and_leave_nothing(http: Http) -> None:
    messages = st.lists(st.dictionaries(ROLES, JSON | st.just("user")), max_size=3)
    value = JSON | messages
    known = [*NAMES, "top_p", "seed", "logprobs", "top_logprobs", "echo", "stream", "min_tokens", "cache_salt", "model"]

    def check(run: Callable[[Awaitable[Any]], Any]) -> None:
        @settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
        @given(PATHS, st.dictionaries(st.sampled_from(known), value) | value, st.binary(max_size=3))
        def examples(path: str, body: Any, noise: bytes) -> None:
            if isinstance(body, dict) and "tokens" not in body and path.startswith("/v1"):
                body = {**body, "max_tokens": 1}
            data = json.dumps(body).encode()
            cut = len(data) // 2
            for content in (data, data[:cut] + noise + data[cut:]):
                response = run(http.plain.post(path, content=content))
                assert response.status_code in (200, 400, 404), (content, response.text)
                if response.status_code != 200:
                    assert response.json()["error"]["param"] is not None, (content, response.text)

        examples()

    await threaded(http, check)
    await http.ledger_is_empty()


async def test_a_request_cut_anywhere_leaves_nothing(http: Http) -> None:
    asked = {"prompt": TEXT, "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 2}
    body = json.dumps(asked).encode()
    whole = json.dumps(asked | {"stream": False, "prompt": [TEXT, [5, 6]]}).encode()
    for payload in (body, whole):
        data = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(payload), payload)
        for cut in (1, 30, 70, len(data) - 1, len(data)):
            reader, writer = await asyncio.open_connection(*http.host)
            for start in range(0, cut, 50):
                writer.write(data[start : min(start + 50, cut)])
                await writer.drain()
            if cut == len(data) and payload is body:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            elif cut == len(data):
                await http.plain.get("/health")
            writer.transport.abort()
        await http.ledger_is_empty()


async def test_ids_of_requests_and_origins_of_pages(http: Http) -> None:
    response = await http.plain.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    minted = response.headers["x-request-id"]
    assert response.json()["id"] == f"cmpl-{minted}"
    response = await http.plain.post(
        "/v1/completions", json={}, headers={"x-request-id": "mine", "origin": "https://x"}
    )
    assert (response.headers["x-request-id"], "access-control-allow-origin" in response.headers) == ("mine", False)
    origin = {"origin": "https://page.example", "access-control-request-method": "POST"}
    allowed = await http.plain.options("/v1/completions", headers=origin)
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"


async def test_bodies_are_bounded(http: Http) -> None:
    largest = 4 << 20
    for headers, content in (({}, b"x" * (largest + 1)), ({"transfer-encoding": "chunked"}, None)):

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b" " * (1 << 20)

        response = await http.plain.post("/v1/completions", content=content or pieces(), headers=headers)
        assert response.status_code == 413
        assert f"{largest}" in response.json()["error"]["message"]
    long = {"prompt": "x = 1\n" * 500_000}
    assert "can't fit" in (await refusal(http, long))["message"]
    assert (await refusal(http, {"prompt": [7] * 700_000}))["param"] == "prompt"
    many = {"messages": [{"role": "user", "content": "x" * 500}] * 2100, "max_tokens": 1}
    assert (await refusal(http, many, "/v1/chat/completions"))["param"] == "messages"
