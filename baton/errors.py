"""All failures that Baton reports, as one tree.

    BatonError                INTERNAL
    ├── InvalidRequest        INVALID_ARGUMENT     a field of a request is wrong: names field and value
    ├── NotFound              NOT_FOUND            an unknown model, transfer, ...
    ├── Unauthenticated       UNAUTHENTICATED      no credentials, or none that are known
    ├── PermissionDenied      PERMISSION_DENIED    known, but not allowed to do this
    ├── Overloaded            RESOURCE_EXHAUSTED   refused now; may be retried after a delay
    │   └── OutOfPages                             a page pool can't hold what was asked
    ├── DeadlineExceeded      DEADLINE_EXCEEDED
    ├── Cancelled             CANCELLED
    ├── Unavailable           UNAVAILABLE          no worker, a lost worker, a draining worker
    ├── Unsupported           UNIMPLEMENTED        this process does not do that
    ├── TransferError         ABORTED              a KV transfer failed; a new attempt may succeed
    │   ├── CorruptFrame                           a checksum, header or payload is wrong
    │   ├── IncompleteTransfer                     a part of the stream, its manifest or its commit is missing
    │   ├── WrongPrefix                            the exporter does not have the requested prefix, but another one
    │   ├── StaleIncarnation                       the exporter was restarted
    │   ├── TicketRefused                          the exporter does not let this worker have it
    │   └── SourceUnreachable                      the exporter can't be reached, or the link broke
    ├── EngineError           INTERNAL             the model runtime failed
    │   ├── NoToken                                for one sequence; the others of its batch go on
    │   └── JoinFailed                             a plan can't give a slot its sequence; nothing was computed
    ├── ConfigError                                start-up: a flag, variable or key is wrong
    └── ModelError                                 start-up: a checkpoint is unusable

Each class carries its gRPC status name and its HTTP status; each front end maps at one point. This module imports
nothing.
"""

from __future__ import annotations

from typing import ClassVar

_SHOWN = 120


def preview(value: object) -> str:
    """`repr(value)`, cut to 120 characters; if it is cut, the number of elements of `value` follows."""
    text = repr(value[: _SHOWN + 1] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(value) if hasattr(value, '__len__') else ''})"


class BatonError(Exception):
    """Root of the tree."""

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500


def unexpected(error: Exception, place: str) -> BatonError:
    """An error for the client instead of one that nobody expected, of which it sees the type only."""
    return BatonError(f"internal error in {place} ({type(error).__name__})")


class InvalidRequest(BatonError):
    """A field of a request is wrong; the message names the field, what is wrong, and the value seen."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, field: str, problem: str, value: object = None) -> None:
        super().__init__(f"{field}: {problem}" + ("" if value is None else f", got {preview(value)}"))
        self.field = field


class NotFound(BatonError):
    """Something named by the caller does not exist."""

    grpc_status = "NOT_FOUND"
    http_status = 404


class Unauthenticated(BatonError):
    """The caller gave no credentials, or none that are known."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(BatonError):
    """The caller is known, or shows a ticket, but may not do this."""

    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class Overloaded(BatonError):
    """Refused now because there is no room; `retry_after` is in seconds, None if a retry can't help.

    `reason` is the label of the metric of refusals.
    """

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, retry_after: float | None = None, *, reason: str = "workers_full") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class OutOfPages(Overloaded):
    """A page pool can't hold what was asked; `note` ends the message."""

    def __init__(self, needed: int, free: int, total: int, note: str = "") -> None:
        super().__init__(f"needs {needed} pages, {free} of {total} are free{note}")
        self.needed, self.free, self.total = needed, free, total


class DeadlineExceeded(BatonError):
    """The request's deadline passed."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(BatonError):
    """The caller went away or cancelled."""

    grpc_status = "CANCELLED"
    http_status = 499


class Unavailable(BatonError):
    """No worker can take this now."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class Unsupported(BatonError):
    """A process of this kind does not do what was asked."""

    grpc_status = "UNIMPLEMENTED"
    http_status = 501


class TransferError(BatonError):
    """A KV transfer failed; what arrived must not be used."""

    grpc_status = "ABORTED"
    http_status = 503


class CorruptFrame(TransferError):
    """A frame's checksum, header or payload is wrong."""


class IncompleteTransfer(TransferError):
    """A stream ended before everything came that its manifest, its commit or the request names."""


class WrongPrefix(TransferError):
    """An exporter does not have the requested prefix, but another one."""


class StaleIncarnation(TransferError):
    """The request was meant for an earlier incarnation of the exporter."""


class TicketRefused(TransferError):
    """The exporter refuses the KV to this worker, because of its ticket or its certificate."""


class SourceUnreachable(TransferError):
    """The exporter can't be reached, or the link to it broke."""


class EngineError(BatonError):
    """The model runtime failed while computing."""


class NoToken(EngineError):
    """No token can be chosen for a sequence: its logits are not finite, none is allowed, or it can't join the batch."""


class JoinFailed(EngineError):
    """A forward pass did not begin, because its plan's sequence for `slot` can't join the batch."""

    def __init__(self, slot: int, problem: str) -> None:
        super().__init__(f"can't join the batch: {problem}")
        self.slot = slot


class ConfigError(BatonError):
    """A flag, environment variable or key is unknown or has a bad value."""


class ModelError(BatonError):
    """A checkpoint can't be used: unsupported, incomplete or damaged."""
