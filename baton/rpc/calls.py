"""Parts of a client's calls: requests from Python values, Python values from responses, credentials, and errors.

Bad values raise InvalidRequest with field and value before a request is sent, as the server would answer.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import operator
import re
import socket
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from baton.completion import Cache, Delta, Messages, Model, Prompt, WorkerGroup
from baton.config.values import parse_address
from baton.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Unauthenticated,
    Unavailable,
    Unsupported,
    preview,
)
from baton.pb import inference_pb2 as pb
from baton.process import executors
from baton.process.executors import WORK
from baton.request import (
    MAX_CACHE_SALT_BYTES,
    MAX_TEMPLATE_JSON,
    PARAMETERS,
    CachePolicy,
    Sampling,
    SamplingParams,
    TemplateArgument,
    check_length,
    check_template_arguments,
    check_token_ids,
    check_unicode,
)
from baton.rpc import convert
from baton.rpc.channel import CLIENT_OPTIONS, CONTROL_MESSAGE_BYTES, Options
from baton.rpc.errors import from_rpc_error
from baton.rpc.tls import role_name

M = TypeVar("M", bound=Message)

_TOKEN_IDS = 2**32
_ARGUMENTS = ("cache", "cache_salt", "report_progress", "chat_template_kwargs", "timeout")
"""Arguments of `generate` beside the sampling parameters."""
_SHORT = 1 << 16
"""Most token ids that are sent as varints, which routers of all versions read; longer prompts have fixed width."""


def generate_request(
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    *,
    cache: Cache = CachePolicy.READ_WRITE,
    cache_salt: str = "",
    report_progress: bool = False,
    chat_template_kwargs: Mapping[str, TemplateArgument] | None = None,
) -> pb.GenerateRequest:
    """A Generate request. A str prompt is text; in other sequences the first element tells token ids from messages."""
    params, given = _params(sampling)
    if not isinstance(report_progress, int):
        raise _wrong("report_progress", "must be true or false", report_progress)
    request = pb.GenerateRequest(
        model=model,
        sampling=convert.sampling_to_proto(params, given),
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
    _add_template_arguments(request, chat_template_kwargs)
    return _sized("prompt", request)


def tokenize_request(
    model: str,
    text: str | Messages,
    add_special_tokens: bool,
    chat_template_kwargs: Mapping[str, TemplateArgument] | None = None,
) -> pb.TokenizeRequest:
    """A Tokenize request for text or messages."""
    request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(text, str):
        request.text = _check_text("text", text)
    else:
        request.chat.CopyFrom(_chat("text", text))
    _add_template_arguments(request, chat_template_kwargs)
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


def _params(given: Mapping[str, Any]) -> tuple[SamplingParams, Collection[str]]:
    """Sampling parameters from any Python values, and the names of those that are given.

    Raises InvalidRequest naming a value of the wrong type.
    """
    if unknown := given.keys() - PARAMETERS.keys():
        raise TypeError(f"generate() and complete() have no argument {min(unknown)!r}{_advice(min(unknown))}")
    wanted = {
        name: _READERS[PARAMETERS[name].kind](name, value)
        for name, value in given.items()
        if value is not None or PARAMETERS[name].default not in (None, ())
    }
    params = SamplingParams(**wanted)
    params.check_vocabulary(_TOKEN_IDS)
    return params, wanted.keys()


def _advice(unknown: str) -> str:
    """Arguments that an unknown one may have meant; empty if none is near."""
    if unknown in ("model", "api_key"):
        return "; it is an argument of the client"
    near = difflib.get_close_matches(unknown, [*PARAMETERS, *_ARGUMENTS], cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, int):
        raise _wrong(name, "must be true or false", value)
    return bool(value)


def _sequence(name: str, values: Any, problem: str = "must be a sequence of token ids") -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise _wrong(name, problem, values) from None


def _texts(name: str, given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else _sequence(name, given, "must be a text or a sequence of texts")
    return tuple(_check_text(f"{name}[{index}]", text) for index, text in enumerate(texts))


def _biases(name: str, given: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, Mapping):
        raise _wrong(name, "must map token ids to numbers", given)
    try:
        biases = {operator.index(token_id): bias for token_id, bias in given.items()}
    except TypeError:
        raise _wrong(name, "must have integers, token ids, as keys", given) from None
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


def _add_template_arguments(request: pb.GenerateRequest | pb.TokenizeRequest, given: Any) -> None:
    name = "chat_template_kwargs"
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise _wrong(name, "must be a mapping of names to values", given)
    if not request.HasField("chat"):
        raise InvalidRequest(name, "can be set for messages only")
    if wrong := [key for key in given if not isinstance(key, str)]:
        raise _wrong(name, "a name must be text", wrong[0])
    check_template_arguments(given)
    try:
        request.chat.chat_template_kwargs = json.dumps(dict(given))
    except ValueError as error:
        # Python writes no numbers of more than some thousand digits.
        raise InvalidRequest(name, f"can't be written as JSON: {error}") from None
    check_length(name, request.chat.chat_template_kwargs, MAX_TEMPLATE_JSON)


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
    # As a router names them, whatever the argument is called.
    check_token_ids("token_ids", ids, _TOKEN_IDS)
    return ids


def _check_text(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise _wrong(name, "must be text", text)
    if (size := len(check_unicode(name, text))) > CONTROL_MESSAGE_BYTES:
        raise _too_large(name, size)
    return text


def _sized(name: str, request: M) -> M:
    if (size := request.ByteSize()) > CONTROL_MESSAGE_BYTES:
        raise _too_large(name, size)
    return request


def _too_large(name: str, size: int) -> InvalidRequest:
    return InvalidRequest(name, f"a request may have at most {CONTROL_MESSAGE_BYTES} bytes", size)


def deltas(response: pb.GenerateResponse) -> list[Delta]:
    """One delta for each choice in the response; fields of the whole request are in the first or the last delta."""
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
        tuple(
            WorkerGroup(each.role, each.workers, each.tensor_parallel, each.pipeline_parallel)
            for each in response.workers
        ),
    )


def serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Whether a health check says SERVING."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


MAX_TIMEOUT_S = 366 * 24 * 3600
"""Longest timeout of a call. gRPC treats a much longer one as no timeout, or as one that has already passed."""

# gRPC's message when gRPC itself ends a call at its deadline.
_SAYS_NOTHING = re.compile(r"(stream removed )?\(?(deadline exceeded)?\)?\.?", re.IGNORECASE)
_NOT_CONNECTED = "failed to connect to all addresses"
"""The beginning of gRPC's message when the client's own connection fails. Routers report those of others."""

_PLAIN_HINTS = {
    "Socket closed": "closed the connection; if it expects TLS, give its CA (ca, --ca)",
    "http1.x server": "speaks HTTP/1.1 and not gRPC: requests go to the grpc address of a router, not to ops",
}
_TLS_HINTS = {
    "WRONG_VERSION_NUMBER": "does not speak TLS: leave out tls and ca (--tls, --ca), or check the address",
    "certificate has expired": "has a certificate that has expired",
    "CERTIFICATE_VERIFY_FAILED": "has a certificate that the given CA did not sign: check ca (--ca)",
    "Socket closed": "closed the connection; if it requires a certificate, give cert and key (--cert, --key)",
}
"""Parts of gRPC's messages without and with TLS, and plain words for what they say of the target."""

_OTHER_NAMES = "Hostname Verification Check failed"
OTHER_NAMES = "has a certificate of other names"
"""gRPC's words for a certificate that does not name what was expected, and ours."""

_NAMES_TIMEOUT_S = 2.0

_NEEDS_KEY = "an API key is needed"
"""Part of a router's message for a call without a key."""

_NO_METHOD = "Method not found!"
"""gRPC's message when a listener does not have the called service."""

# gRPC's messages when there is no such process, or no such host.
_UNREACHED = re.compile(
    r"failed to connect to all addresses.*"
    r"(connection refused|no route to host|network is unreachable|connection timed out)( \(\d+\))?",
    re.DOTALL | re.IGNORECASE,
)
_UNRESOLVED = re.compile(r"(errors resolving|DNS resolution failed for) .*", re.DOTALL)


_URI = re.compile(r"(dns|unix|unix-abstract|ipv4|ipv6|xds):.+")
_API_KEY = re.compile(r"[!-~]+")


def check_target(target: Any) -> None:
    """Raise ConfigError unless `target` is "host:port", or another name of gRPC such as "dns:///host:port"."""
    if not isinstance(target, str):
        raise ConfigError(f"target: must be HOST:PORT, got {preview(target)}")
    if not _URI.fullmatch(target):
        try:
            parse_address(target)
        except ConfigError as error:
            raise ConfigError(f"target: {error}") from None


def can_be_key(text: str) -> bool:
    """Whether metadata can carry `text` as an API key."""
    return _API_KEY.fullmatch(text) is not None


class ClientCall:
    """A call to `target` with `timeout` in seconds, or None for no deadline; `tls` are its settings, None without TLS.

    Raises InvalidRequest if `timeout` is not a finite number of at most MAX_TIMEOUT_S.
    """

    def __init__(self, target: str, timeout: float | None, tls: Security | None) -> None:
        if timeout is not None and not (isinstance(timeout, numbers.Real) and _usable(timeout)):
            problem = f"must be a number of at most {MAX_TIMEOUT_S} seconds, got {preview(timeout)}"
            raise InvalidRequest("timeout", problem)
        self.timeout = timeout
        self._target = target
        self._tls = tls
        self._tokens: int | None = None

    def start_stream(self) -> None:
        """Record that the call streams tokens."""
        self._tokens = 0

    def count_tokens(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Count the tokens in `deltas`; returns `deltas`."""
        self._tokens = (self._tokens or 0) + sum(len(delta.tokens) for delta in deltas)
        return deltas

    async def to_error_async(self, error: grpc.RpcError) -> BatonError:
        """The same as `to_error`, without blocking the event loop."""
        if _OTHER_NAMES in (error.details() or ""):
            return await executors.run(WORK, self.to_error, error)
        return self.to_error(error)

    def to_error(self, error: grpc.RpcError) -> BatonError:
        """The Baton error of a failed call. If the certificate has other names, it asks the target for them."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and self.timeout is not None:
            more = "" if _SAYS_NOTHING.fullmatch(details) else f": {details}"
            return DeadlineExceeded(f"the deadline of {self.timeout:g} s passed{self._progress()}{more}")
        if code is grpc.StatusCode.UNAUTHENTICATED and _NEEDS_KEY in details:
            return Unauthenticated(f"{details}; give it as api_key (--api-key-file, or the variable BATON_API_KEY)")
        if code is grpc.StatusCode.UNIMPLEMENTED and details == _NO_METHOD:
            return Unsupported(f"{self._target} has no such method: requests go to the grpc address of a router")
        if code is grpc.StatusCode.UNAVAILABLE and (why := self._connection_problem(details)):
            return Unavailable(why)
        return from_rpc_error(error)

    def _connection_problem(self, details: str) -> str:
        """The reason why there is no connection, in plain words; "" if gRPC's message is about something else."""
        if _UNRESOLVED.fullmatch(details):
            return f"cannot find the host of {self._target}; check the address"
        if not details.startswith(_NOT_CONNECTED):
            return ""
        if found := _UNREACHED.fullmatch(details):
            return f"cannot connect to {self._target}: {found[1].lower()}; check the address, and that the process runs"
        if self._tls is not None and _OTHER_NAMES in details:
            return f"{self._target} {OTHER_NAMES}{_describe_names(_names_at(self._target, self._tls))}"
        hints = _PLAIN_HINTS if self._tls is None else _TLS_HINTS
        return next((f"{self._target} {hint}" for words, hint in hints.items() if words in details), "")

    def _progress(self) -> str:
        if self._tokens is None:
            return ""
        if not self._tokens:
            return " before the first token"
        return f" after {self._tokens} token{'s' if self._tokens > 1 else ''}"


def _names_at(target: str, tls: Security) -> list[str]:
    """The names in the certificate of `target`; none if it can't be read, or is not trusted."""
    ca, cert, key = tls.get("ca"), tls.get("cert"), tls.get("key")
    try:
        host, port = parse_address(target)
        context = ssl.create_default_context(cafile=ca)
        context.check_hostname = False
        context.set_alpn_protocols(["h2"])
        if cert is not None:
            context.load_cert_chain(cert, key)
        with (
            socket.create_connection((host, port), timeout=_NAMES_TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as secured,
        ):
            found: Any = secured.getpeercert() or {}
    except (OSError, ValueError, ConfigError):
        return []
    return [str(name) for _, name in found.get("subjectAltName", ())]


def _describe_names(names: Sequence[str]) -> str:
    listed = f" ({', '.join(names)})" if names else ""
    for role in ("mixed", "prefill", "decode"):
        if role_name(role) in names:
            return f"{listed}: it is a {role} worker, and requests go to a router"
    return f"{listed}: server_name (--server-name) is the name to expect"


def _usable(timeout: Any) -> bool:
    return math.isfinite(timeout) and timeout <= MAX_TIMEOUT_S


File = str | PathLike[str]

_OPTIONS: Options = [
    *CLIENT_OPTIONS,
    # A client's connection is its own: several clients of a process reach several routers on one port.
    ("grpc.use_local_subchannel_pool", 1),
]


class Security(TypedDict, total=False):
    """TLS settings of a client; without any, the connection is not encrypted."""

    tls: bool
    ca: File | None
    cert: File | None
    key: File | None
    server_name: str | None


def client_credentials(
    *,
    tls: bool = False,
    ca: File | None = None,
    cert: File | None = None,
    key: File | None = None,
    server_name: str | None = None,
) -> tuple[grpc.ChannelCredentials | None, Options]:
    """Credentials, or None for a channel without TLS, and the options of the channel.

    Raises ConfigError, which names the setting, if a setting is missing or its file can't be used.
    """
    given = {"ca": ca, "cert": cert, "key": key}
    if (cert is None) != (key is None):
        raise ConfigError(f"{'cert' if cert is None else 'key'}: is missing, cert and key go together")
    if not tls and server_name is None and all(file is None for file in given.values()):
        return None, _OPTIONS
    contents = {name: None if file is None else _read(name, Path(file)) for name, file in given.items()}
    _check_pair(contents["cert"], contents["key"], key)
    credentials = grpc.ssl_channel_credentials(contents["ca"], contents["key"], contents["cert"])
    if server_name is None:
        return credentials, _OPTIONS
    return credentials, [*_OPTIONS, ("grpc.ssl_target_name_override", server_name)]


def _read(name: str, file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {str(file)!r} can't be read: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        # gRPC would only say, at the first call, that no connection could be made.
        raise ConfigError(f"{name}: {str(file)!r} is not a PEM file")
    if name == "ca":
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
        except ssl.SSLError:
            raise ConfigError(f"ca: {str(file)!r} holds no certificate, or a damaged one") from None
    return data


def _check_pair(cert: bytes | None, key: bytes | None, path: File | None) -> None:
    """Raise ConfigError if certificate and key do not match, because gRPC's own error comes late and is unclear."""
    if cert is None or key is None:
        return
    # Imported only if there is a certificate, because it is slow to import.
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        chain = x509.load_pem_x509_certificates(cert)
    except ValueError as error:
        raise ConfigError(f"cert: holds no PEM certificate: {error}") from None
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"key: {str(path)!r} holds no unencrypted PEM private key: {error}") from None
    if chain[0].public_key() != private.public_key():
        raise ConfigError(f"key: {str(path)!r} is not the key of the certificate")
