from baton.pb import inference_pb2 as _inference_pb2
from baton.pb import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "transfer_id", "prompt_token_ids", "output_token_ids", "choice_indexes", "sampling", "cache_salt", "cache", "prefix_source", "tenant", "report_progress", "in_place")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REPORT_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    transfer_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    choice_indexes: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    cache_salt: bytes
    cache: _inference_pb2.CachePolicy
    prefix_source: PrefixSource
    tenant: bytes
    report_progress: bool
    in_place: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., transfer_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., choice_indexes: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., cache: _Optional[_Union[_inference_pb2.CachePolicy, str]] = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ..., tenant: _Optional[bytes] = ..., report_progress: _Optional[bool] = ..., in_place: _Optional[bool] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("export", "tokens")
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    export: _kv_pb2.RemoteExport
    tokens: int
    def __init__(self, export: _Optional[_Union[_kv_pb2.RemoteExport, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("transfer_id", "incarnation")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    incarnation: str
    def __init__(self, transfer_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class AbandonResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("start", "tokens")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenInfo]
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_inference_pb2.TokenInfo, _Mapping]]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("first_tokens", "cached_tokens", "cached")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedCompositeFieldContainer[_kv_pb2.FirstToken]
    cached_tokens: int
    cached: _inference_pb2.CachedTokens
    def __init__(self, first_tokens: _Optional[_Iterable[_Union[_kv_pb2.FirstToken, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., cached: _Optional[_Union[_inference_pb2.CachedTokens, _Mapping]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("done", "prefill_progress", "prompt_logprobs")
    DONE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    done: PrefillDone
    prefill_progress: _inference_pb2.PrefillProgress
    prompt_logprobs: PromptLogprobs
    def __init__(self, done: _Optional[_Union[PrefillDone, _Mapping]] = ..., prefill_progress: _Optional[_Union[_inference_pb2.PrefillProgress, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...
