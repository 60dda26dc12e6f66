from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheTier(_message.Message):
    __slots__ = ("name", "blocks", "bytes", "capacity_bytes", "hits", "misses", "bytes_per_second", "state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    blocks: int
    bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    bytes_per_second: float
    state: str
    def __init__(self, name: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., bytes_per_second: _Optional[float] = ..., state: _Optional[str] = ...) -> None: ...

class CacheResponse(_message.Message):
    __slots__ = ("process", "role", "tiers")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    process: str
    role: str
    tiers: _containers.RepeatedCompositeFieldContainer[CacheTier]
    def __init__(self, process: _Optional[str] = ..., role: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[CacheTier, _Mapping]]] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("redis",)
    REDIS_FIELD_NUMBER: _ClassVar[int]
    redis: bool
    def __init__(self, redis: _Optional[bool] = ...) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: _containers.RepeatedCompositeFieldContainer[CacheTier]
    def __init__(self, dropped: _Optional[_Iterable[_Union[CacheTier, _Mapping]]] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("owner", "kind", "state", "pages", "bytes", "age_s", "deadline_s", "tenant", "detail")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    owner: str
    kind: str
    state: str
    pages: int
    bytes: int
    age_s: float
    deadline_s: float
    tenant: str
    detail: str
    def __init__(self, owner: _Optional[str] = ..., kind: _Optional[str] = ..., state: _Optional[str] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., deadline_s: _Optional[float] = ..., tenant: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class LedgerResponse(_message.Message):
    __slots__ = ("process", "role", "incarnation", "entries", "pages_total", "pages_free", "pages_cached", "violation", "tensor_parallel", "pipeline_parallel")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    process: str
    role: str
    incarnation: str
    entries: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    pages_total: int
    pages_free: int
    pages_cached: int
    violation: str
    tensor_parallel: int
    pipeline_parallel: int
    def __init__(self, process: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., violation: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ...) -> None: ...
