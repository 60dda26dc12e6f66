"""Makes the client's requests from Python values, and Python values from responses.

A request that the server would refuse is refused here, with the same exception: InvalidRequest naming field and value.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from baton.completion import Cache, Delta, Messages, Model, Prompt
from baton.errors import InvalidRequest, preview
from baton.pb import inference_pb2 as pb
from baton.request import MAX_CACHE_SALT_BYTES, PARAMETERS, CachePolicy, Sampling, SamplingParams, check_token_ids
from baton.rpc import convert
from baton.rpc.channel import CONTROL_MESSAGE_BYTES

M = TypeVar("M", bound=Message)

_TOKEN_IDS = 2**32
_SHORT = 1 << 16
"""Token ids of prompts that routers of all versions read; longer ones go in fixed width."""


def generate_request(
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    *,
    cache: Cache = CachePolicy.READ_WRITE,
    cache_salt: str = "",
    report_progress: bool = False,
) -> pb.GenerateRequest:
    """A Generate request. A str is text; other sequences are token ids or messages; their first element decides."""
    params = _params(sampling)
    if not isinstance(report_progress, int):
        raise _wrong("report_progress", "must be true or false", report_progress)
    request = pb.GenerateRequest(
        model=model,
        sampling=convert.sampling_to_proto(params),
        cache=convert.cache_policy_to_proto(_policy(cache)),
        cache_salt=_salt(cache_salt),
        report_progress=report_progress,
    )
    if isinstance(prompt, str):
        request.text = _check_text("prompt", prompt)
    elif _is_chat(prompt):
        request.chat.CopyFrom(_chat("prompt", prompt))
    else:
        ids = _token_ids("prompt", prompt)
        (request.token_ids.ids if len(ids) <= _SHORT else request.token_ids.long_ids).extend(ids)
    return _sized("prompt", request)


def tokenize_request(model: str, text: str | Messages, add_special_tokens: bool) -> pb.TokenizeRequest:
    """A Tokenize request for text or messages."""
    request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(text, str):
        request.text = _check_text("text", text)
    else:
        request.chat.CopyFrom(_chat("text", text))
    return _sized("text", request)


def detokenize_request(model: str, token_ids: Sequence[int], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """A Detokenize request."""
    ids = _token_ids("token_ids", token_ids)
    request = pb.DetokenizeRequest(model=model, token_ids=ids, skip_special_tokens=skip_special_tokens)
    return _sized("token_ids", request)


def _policy(cache: Any) -> CachePolicy:
    try:
        return CachePolicy(cache)
    except ValueError:
        known = ", ".join(policy.value for policy in CachePolicy)
        raise _wrong("cache", f"must be one of {known}", cache) from None


def _salt(cache_salt: Any) -> str:
    if (size := len(_check_text("cache_salt", cache_salt).encode())) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequest("cache_salt", f"may have at most {MAX_CACHE_SALT_BYTES} bytes", size)
    return str(cache_salt)


def _params(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from any Python values; raises InvalidRequest naming a value of the wrong type."""
    if unknown := given.keys() - PARAMETERS.keys():
        raise TypeError(f"generate() and complete() have no argument {min(unknown)!r}")
    wanted = {
        name: _READERS[PARAMETERS[name].kind](name, value)
        for name, value in given.items()
        if value is not None or PARAMETERS[name].default not in (None, ())
    }
    params = SamplingParams(**wanted)
    params.check_vocabulary(_TOKEN_IDS)
    return params


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, int):
        raise _wrong(name, "must be true or false", value)
    return bool(value)


def _sequence(name: str, values: Any) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise _wrong(name, "must be a sequence", values) from None


def _texts(name: str, given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else _sequence(name, given)
    return tuple(_check_text(f"{name}[{index}]", text) for index, text in enumerate(texts))


def _biases(name: str, given: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, Mapping):
        raise _wrong(name, "must map token ids to numbers", given)
    biases = {_integer(name, token_id): bias for token_id, bias in given.items()}
    return tuple((token_id, _number(f"{name}[{token_id}]", biases[token_id])) for token_id in sorted(biases))


def _integers(name: str, given: Any) -> tuple[int, ...]:
    values = _sequence(name, given)
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        # There may be as many as the vocabulary has, so names of elements are made only in case of an error.
        return tuple(_integer(f"{name}[{index}]", value) for index, value in enumerate(values))


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong(name, "must be an integer", value) from None


def _number(name: str, value: Any) -> Any:
    if not isinstance(value, numbers.Real):
        raise _wrong(name, "must be a number", value)
    return value


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "int": _integer,
    "float": _number,
    "bool": _switch,
    "tuple[str, ...]": _texts,
    "tuple[int, ...]": _integers,
    "tuple[tuple[int, float], ...]": _biases,
}


def _wrong(name: str, problem: str, value: Any) -> InvalidRequest:
    """An InvalidRequest that shows the value even if it is None."""
    return InvalidRequest(name, f"{problem}, got {preview(value)}")


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _chat(name: str, messages: Any) -> pb.Chat:
    chat = pb.Chat()
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidRequest(f"{name}[{index}]", "must have role and content and nothing else", message)
        for key, text in message.items():
            _check_text(f"{name}[{index}].{key}", text)
        chat.messages.add(role=message["role"], content=message["content"])
    return chat


def _token_ids(name: str, token_ids: Any) -> list[int]:
    try:
        # Each id takes at least a byte.
        if len(token_ids) > CONTROL_MESSAGE_BYTES:
            raise _too_large(name, len(token_ids))
        # A bool is an integer to Python, and an error in a list of token ids.
        if isinstance(token_ids, (bytes, bytearray)) or bool in map(type, token_ids):
            raise TypeError
        ids = [operator.index(token_id) for token_id in token_ids]
    except TypeError:
        raise _wrong(name, "must be text, token ids or messages", token_ids) from None
    check_token_ids(name, ids, _TOKEN_IDS)
    return ids


def _check_text(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise _wrong(name, "must be text", text)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(name, f"not valid Unicode at character {error.start}", text[error.start]) from None
    if size > CONTROL_MESSAGE_BYTES:
        raise _too_large(name, size)
    return text


def _sized(name: str, request: M) -> M:
    if (size := request.ByteSize()) > CONTROL_MESSAGE_BYTES:
        raise _too_large(name, size)
    return request


def _too_large(name: str, size: int) -> InvalidRequest:
    return InvalidRequest(name, f"a request may have at most {CONTROL_MESSAGE_BYTES} bytes", size)


def deltas(response: pb.GenerateResponse) -> list[Delta]:
    """One delta for each choice of the event. Fields of the whole request are in the first or the last delta."""
    found = [_delta(response.request_id, choice) for choice in response.choices]
    if not found:
        found = [Delta(response.request_id, 0)]
    if response.prompt_tokens:
        prompt_tokens = tuple(convert.token_from_proto(token) for token in response.prompt_tokens)
        found[0] = replace(found[0], prompt_tokens=prompt_tokens)
    if response.HasField("prefill_progress"):
        found[0] = replace(found[0], progress=convert.progress_from_proto(response.prefill_progress))
    if response.HasField("usage"):
        found[-1] = replace(found[-1], usage=convert.usage_from_proto(response.usage))
    if response.HasField("timings"):
        found[-1] = replace(found[-1], timings_ms=convert.timings_from_proto(response.timings))
    return found


def _delta(request_id: str, choice: pb.ChoiceDelta) -> Delta:
    cause = choice.WhichOneof("stop_cause")
    return Delta(
        request_id,
        choice.index,
        choice.text,
        tuple(convert.token_from_proto(token) for token in choice.tokens),
        convert.finish_from_proto(choice.finish_reason),
        getattr(choice, cause) if cause else None,
    )


def model(response: pb.GetModelResponse) -> Model:
    """The served model."""
    return Model(
        response.name,
        response.max_model_len,
        response.vocab_size,
        tuple(response.eos_token_ids),
        response.has_chat_template,
        response.fingerprint,
    )


def serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Whether a health check says SERVING."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
