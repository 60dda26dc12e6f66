from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("process", "role", "incarnation", "entries", "pages_total", "pages_free", "pages_cached", "violation")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    process: str
    role: str
    incarnation: str
    entries: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    pages_total: int
    pages_free: int
    pages_cached: int
    violation: str
    def __init__(self, process: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., violation: _Optional[str] = ...) -> None: ...
