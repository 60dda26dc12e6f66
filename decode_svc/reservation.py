"""The size of a reservation, and the checks of the request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.contract import EngineSpec
from baton.errors import InvalidRequest
from baton.kv.hashing import DIGEST_BYTES, MAX_SALT_BYTES
from baton.request import MAX_CHOICES
from decode_svc.messages import Reserve


class ReservationTooLarge(InvalidRequest):
    """The worker can't hold the reservation, even when it is empty; the message says why."""


@dataclass(frozen=True, slots=True)
class ReservationSize:
    """The size of a reservation.

    `tokens` is the number of tokens of one choice that get pages. `spare_tokens` is the size of the page that forks
    can't share, or 0. `pages` is the number of all these pages, also of pages that may be shared with other handles.
    At most `pinnable_tokens` tokens of the context may be pinned.
    """

    tokens: int
    spare_tokens: int
    pages: int
    pinnable_tokens: int


def size_reservation(
    spec: EngineSpec, reservation: Reserve, reserve_tokens: int, computed_tokens: int = 0
) -> ReservationSize:
    """Compute the size of a reservation with room for at most `reserve_tokens` outputs.

    The last `computed_tokens` tokens of the context are not pinned, because prefill computes them into its pages.
    Raises InvalidRequest if the reservation is malformed, ReservationTooLarge if one choice is longer than
    `spec.max_model_len` or does not fit into the whole pool.
    """
    _check_fields(spec, reservation)
    longest = reservation.context_tokens + reservation.max_new_tokens
    if longest > spec.max_model_len:
        # Routers accept what all workers can hold; this one joined later, with a smaller limit.
        problem = f"with {reservation.context_tokens} tokens of context it exceeds max_model_len {spec.max_model_len}"
        raise ReservationTooLarge("max_new_tokens", problem, reservation.max_new_tokens)
    tokens = reservation.context_tokens + min(reservation.max_new_tokens, reserve_tokens)
    pages = spec.pages_for(tokens)
    whole = spec.pages_for(longest)
    if whole > spec.pages:
        problem = f"needs {whole} pages, there are {spec.pages}"
        raise ReservationTooLarge("context_tokens", problem, reservation.context_tokens)
    # If the first choice needs all pages, none is left to spare: pending choices are given back at the commit.
    splits = reservation.choices > 1 and reservation.context_tokens % spec.page_size > 0 and pages < spec.pages
    pinnable_tokens = max(reservation.context_tokens - computed_tokens, 0)
    return ReservationSize(tokens, spec.page_size if splits else 0, pages + splits, pinnable_tokens)


def _check_fields(spec: EngineSpec, reservation: Reserve) -> None:
    for name in ("context_tokens", "max_new_tokens", "choices"):
        if (value := getattr(reservation, name)) < 1:
            raise InvalidRequest(f"reserve.{name}", "must be at least 1", value)
    if reservation.choices > MAX_CHOICES:
        raise InvalidRequest("reserve.choices", f"must be at most {MAX_CHOICES}", reservation.choices)
    size, most = len(reservation.prefix_digests), reservation.context_tokens // spec.kv_format.block_size
    if size % DIGEST_BYTES:
        problem = f"its length must be a multiple of {DIGEST_BYTES} bytes"
        raise InvalidRequest("reserve.prefix_digests", problem, size)
    if size > most * DIGEST_BYTES:
        problem = f"must have at most one digest for each of the {most} full blocks of the context"
        raise InvalidRequest("reserve.prefix_digests", problem, size // DIGEST_BYTES)
    if (salt_size := len(reservation.cache_salt)) > MAX_SALT_BYTES:
        raise InvalidRequest("reserve.cache_salt", f"must have at most {MAX_SALT_BYTES} bytes", salt_size)
