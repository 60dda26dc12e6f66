from baton.pb import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvPartFormat(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class KvFormat(_message.Message):
    __slots__ = ("version", "parts", "layers", "block_size")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    version: int
    parts: _containers.RepeatedCompositeFieldContainer[KvPartFormat]
    layers: int
    block_size: int
    def __init__(self, version: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[KvPartFormat, _Mapping]]] = ..., layers: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("kv_address", "layer_start", "layer_end", "head_start", "head_end")
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    kv_address: str
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    def __init__(self, kv_address: _Optional[str] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ...) -> None: ...

class RemoteExport(_message.Message):
    __slots__ = ("transfer_id", "incarnation", "shards", "ticket")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    incarnation: str
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    ticket: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class FetchKvRequest(_message.Message):
    __slots__ = ("transfer_id", "incarnation", "token_start", "token_end", "layer_start", "layer_end", "head_start", "head_end", "ticket", "consumer", "retry")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    incarnation: str
    token_start: int
    token_end: int
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    ticket: bytes
    consumer: str
    retry: int
    def __init__(self, transfer_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ..., ticket: _Optional[bytes] = ..., consumer: _Optional[str] = ..., retry: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("transfer_id", "incarnation", "consumer", "expires_unix_ms")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    incarnation: str
    consumer: str
    expires_unix_ms: int
    def __init__(self, transfer_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., consumer: _Optional[str] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...

class SignedTicket(_message.Message):
    __slots__ = ("ticket", "signature", "key_id")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    signature: bytes
    key_id: bytes
    def __init__(self, ticket: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., key_id: _Optional[bytes] = ...) -> None: ...

class KvPart(_message.Message):
    __slots__ = ("name", "dtype", "shape", "length")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    length: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., length: _Optional[int] = ...) -> None: ...

class KvHeader(_message.Message):
    __slots__ = ("layer", "token_start", "token_count", "head_start", "head_count", "parts", "checksum")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    layer: int
    token_start: int
    token_count: int
    head_start: int
    head_count: int
    parts: _containers.RepeatedCompositeFieldContainer[KvPart]
    checksum: int
    def __init__(self, layer: _Optional[int] = ..., token_start: _Optional[int] = ..., token_count: _Optional[int] = ..., head_start: _Optional[int] = ..., head_count: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[KvPart, _Mapping]]] = ..., checksum: _Optional[int] = ...) -> None: ...

class KvRange(_message.Message):
    __slots__ = ("layer", "token_start", "token_end")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    layer: int
    token_start: int
    token_end: int
    def __init__(self, layer: _Optional[int] = ..., token_start: _Optional[int] = ..., token_end: _Optional[int] = ...) -> None: ...

class KvManifest(_message.Message):
    __slots__ = ("frames", "ranges", "digest", "shard")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    frames: int
    ranges: _containers.RepeatedCompositeFieldContainer[KvRange]
    digest: int
    shard: Shard
    def __init__(self, frames: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[KvRange, _Mapping]]] = ..., digest: _Optional[int] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ...) -> None: ...

class KvCommit(_message.Message):
    __slots__ = ("length", "version", "handoff", "digest", "prefix_digest", "shards")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    length: int
    version: int
    handoff: bytes
    digest: bytes
    prefix_digest: bytes
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, length: _Optional[int] = ..., version: _Optional[int] = ..., handoff: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., prefix_digest: _Optional[bytes] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "output_token_ids", "sampling", "first_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice_index", "token", "finish_reason")
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    choice_index: int
    token: _inference_pb2.TokenInfo
    finish_reason: _inference_pb2.FinishReason
    def __init__(self, choice_index: _Optional[int] = ..., token: _Optional[_Union[_inference_pb2.TokenInfo, _Mapping]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ...) -> None: ...

class KvFrame(_message.Message):
    __slots__ = ("header", "payload", "manifest", "commit")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    header: KvHeader
    payload: bytes
    manifest: KvManifest
    commit: KvCommit
    def __init__(self, header: _Optional[_Union[KvHeader, _Mapping]] = ..., payload: _Optional[bytes] = ..., manifest: _Optional[_Union[KvManifest, _Mapping]] = ..., commit: _Optional[_Union[KvCommit, _Mapping]] = ...) -> None: ...

class ReleaseKvRequest(_message.Message):
    __slots__ = ("transfer_id", "incarnation", "ticket", "consumer")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    incarnation: str
    ticket: bytes
    consumer: str
    def __init__(self, transfer_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., ticket: _Optional[bytes] = ..., consumer: _Optional[str] = ...) -> None: ...

class ReleaseKvResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
