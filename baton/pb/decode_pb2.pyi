from baton.pb import inference_pb2 as _inference_pb2
from baton.pb import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttemptKey(_message.Message):
    __slots__ = ("request_id", "attempt", "reservation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reservation: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reservation: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "wire_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    wire_version: int
    def __init__(self, router_id: _Optional[str] = ..., wire_version: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("key", "context_tokens", "max_new_tokens", "choices", "deadline_ms", "prefix_digests", "cache_salt", "cache")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    context_tokens: int
    max_new_tokens: int
    choices: int
    deadline_ms: int
    prefix_digests: bytes
    cache_salt: bytes
    cache: _inference_pb2.CachePolicy
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., context_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., choices: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., prefix_digests: _Optional[bytes] = ..., cache_salt: _Optional[bytes] = ..., cache: _Optional[_Union[_inference_pb2.CachePolicy, str]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("key", "source", "deadline_ms", "prefix_transfer_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    source: _kv_pb2.RemoteExport
    deadline_ms: int
    prefix_transfer_id: str
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., source: _Optional[_Union[_kv_pb2.RemoteExport, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., prefix_transfer_id: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key", "choice_index")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    choice_index: int
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., choice_index: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("live",)
    LIVE_FIELD_NUMBER: _ClassVar[int]
    live: _containers.RepeatedCompositeFieldContainer[AttemptKey]
    def __init__(self, live: _Optional[_Iterable[_Union[AttemptKey, _Mapping]]] = ...) -> None: ...

class SessionUp(_message.Message):
    __slots__ = ("hello", "reserve", "start", "cancel", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reserve: Reserve
    start: Start
    cancel: Cancel
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class ReserveResult(_message.Message):
    __slots__ = ("key", "granted", "reason", "too_small", "cached_tokens", "waiting")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOO_SMALL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    granted: bool
    reason: str
    too_small: bool
    cached_tokens: int
    waiting: bool
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., granted: _Optional[bool] = ..., reason: _Optional[str] = ..., too_small: _Optional[bool] = ..., cached_tokens: _Optional[int] = ..., waiting: _Optional[bool] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("key", "choice_index", "output_index", "tokens", "finish_reason", "timings")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    choice_index: int
    output_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenInfo]
    finish_reason: _inference_pb2.FinishReason
    timings: DecodeTimings
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., choice_index: _Optional[int] = ..., output_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_inference_pb2.TokenInfo, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., timings: _Optional[_Union[DecodeTimings, _Mapping]] = ...) -> None: ...

class DecodeTimings(_message.Message):
    __slots__ = ("fetch_ms", "slot_wait_ms")
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    SLOT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    fetch_ms: float
    slot_wait_ms: float
    def __init__(self, fetch_ms: _Optional[float] = ..., slot_wait_ms: _Optional[float] = ...) -> None: ...

class AttemptFailure(_message.Message):
    __slots__ = ("key", "kind", "message")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[AttemptFailure.Kind]
        KIND_SOURCE_UNREACHABLE: _ClassVar[AttemptFailure.Kind]
        KIND_TRANSFER: _ClassVar[AttemptFailure.Kind]
        KIND_ENGINE: _ClassVar[AttemptFailure.Kind]
        KIND_DEADLINE: _ClassVar[AttemptFailure.Kind]
        KIND_DRAINING: _ClassVar[AttemptFailure.Kind]
        KIND_PREEMPTED: _ClassVar[AttemptFailure.Kind]
    KIND_UNSPECIFIED: AttemptFailure.Kind
    KIND_SOURCE_UNREACHABLE: AttemptFailure.Kind
    KIND_TRANSFER: AttemptFailure.Kind
    KIND_ENGINE: AttemptFailure.Kind
    KIND_DEADLINE: AttemptFailure.Kind
    KIND_DRAINING: AttemptFailure.Kind
    KIND_PREEMPTED: AttemptFailure.Kind
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: AttemptKey
    kind: AttemptFailure.Kind
    message: str
    def __init__(self, key: _Optional[_Union[AttemptKey, _Mapping]] = ..., kind: _Optional[_Union[AttemptFailure.Kind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class SessionDown(_message.Message):
    __slots__ = ("reserved", "outputs", "failures", "heartbeat", "ended")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    reserved: _containers.RepeatedCompositeFieldContainer[ReserveResult]
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    failures: _containers.RepeatedCompositeFieldContainer[AttemptFailure]
    heartbeat: Heartbeat
    ended: _containers.RepeatedCompositeFieldContainer[AttemptKey]
    def __init__(self, reserved: _Optional[_Iterable[_Union[ReserveResult, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[AttemptFailure, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., ended: _Optional[_Iterable[_Union[AttemptKey, _Mapping]]] = ...) -> None: ...
