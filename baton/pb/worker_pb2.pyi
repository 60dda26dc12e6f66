from baton.pb import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_MIXED: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_MIXED: WorkerRole

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerIdentity(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "model", "fingerprint", "kv_format", "converts_kv", "tokenizer_digest", "max_model_len", "shards", "principal", "ticket_key_ids", "wire_version", "tensor_parallel", "pipeline_parallel")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CONVERTS_KV_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    TICKET_KEY_IDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    incarnation: str
    model: str
    fingerprint: str
    kv_format: _kv_pb2.KvFormat
    converts_kv: bool
    tokenizer_digest: str
    max_model_len: int
    shards: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Shard]
    principal: str
    ticket_key_ids: _containers.RepeatedScalarFieldContainer[bytes]
    wire_version: int
    tensor_parallel: int
    pipeline_parallel: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., kv_format: _Optional[_Union[_kv_pb2.KvFormat, _Mapping]] = ..., converts_kv: _Optional[bool] = ..., tokenizer_digest: _Optional[str] = ..., max_model_len: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[_kv_pb2.Shard, _Mapping]]] = ..., principal: _Optional[str] = ..., ticket_key_ids: _Optional[_Iterable[bytes]] = ..., wire_version: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("pending_tokens", "pages_used", "pages_total", "page_size", "slots_used", "slots_total", "tokens_per_second", "requests_without_token", "step_seconds", "transfer_bytes_per_second")
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WITHOUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    pending_tokens: int
    pages_used: int
    pages_total: int
    page_size: int
    slots_used: int
    slots_total: int
    tokens_per_second: float
    requests_without_token: int
    step_seconds: float
    transfer_bytes_per_second: float
    def __init__(self, pending_tokens: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., page_size: _Optional[int] = ..., slots_used: _Optional[int] = ..., slots_total: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., requests_without_token: _Optional[int] = ..., step_seconds: _Optional[float] = ..., transfer_bytes_per_second: _Optional[float] = ...) -> None: ...

class PrefixChanges(_message.Message):
    __slots__ = ("reset", "stored", "dropped")
    RESET_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    stored: bytes
    dropped: bytes
    def __init__(self, reset: _Optional[bool] = ..., stored: _Optional[bytes] = ..., dropped: _Optional[bytes] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("identity", "load", "draining", "stalled", "prefixes")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    identity: WorkerIdentity
    load: WorkerLoad
    draining: bool
    stalled: bool
    prefixes: PrefixChanges
    def __init__(self, identity: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., draining: _Optional[bool] = ..., stalled: _Optional[bool] = ..., prefixes: _Optional[_Union[PrefixChanges, _Mapping]] = ...) -> None: ...
