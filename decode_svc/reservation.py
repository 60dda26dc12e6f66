"""Reservations: a router's request for pages, its size, and the checks of the request and of its handoff. Pure."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from baton.engine.contract import EngineSpec
from baton.errors import IncompleteTransfer, InvalidRequest
from baton.kv.hashing import DIGEST_BYTES, MAX_SALT_BYTES, PackedDigests
from baton.request import MAX_CHOICES, CachePolicy, Handoff, check_token_ids, join_ids


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """The name of an attempt: the id of its request, and the number of the attempt."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Command to reserve pages for a context of `context_tokens` tokens and `max_new_tokens` outputs of each choice.

    `deadline_s` is the number of seconds until the request's deadline, or None. `prefix_digests` are the joined digests
    of leading full blocks of the context; blocks that this worker already has are not transferred. `cache_salt` is the
    salt of these digests (`baton.kv.hashing`).
    """

    key: AttemptKey
    context_tokens: int
    max_new_tokens: int
    choices: int
    deadline_s: float | None = None
    prefix_digests: bytes = b""
    cache_salt: bytes = b""
    cache: CachePolicy = CachePolicy.READ_WRITE


class InvalidReservation(InvalidRequest):
    """The reservation can never be granted; the message says why."""


@dataclass(frozen=True, slots=True)
class ReservationSize:
    """The size of a reservation.

    `tokens` is the number of tokens of one choice that get pages. `spare_tokens` is the size of the page that forks
    can't share, or 0. `pages` is the number of all these pages, also of pages that may be shared with other handles.
    """

    tokens: int
    spare_tokens: int
    pages: int


def size_reservation(spec: EngineSpec, request: Reserve, reserve_tokens: int) -> ReservationSize:
    """Compute the size of a reservation with room for at most `reserve_tokens` outputs.

    Raises InvalidReservation if the request is malformed, or if one choice does not fit into the whole pool.
    """
    for name, value, limit in (
        ("context_tokens", request.context_tokens, spec.max_model_len - 1),
        ("max_new_tokens", request.max_new_tokens, None),
        ("choices", request.choices, MAX_CHOICES),
    ):
        if value < 1 or (limit is not None and value > limit):
            raise InvalidReservation(name, "must be at least 1" + (f" and at most {limit}" if limit else ""), value)
    _check_digests(spec, request)
    longest = request.context_tokens + request.max_new_tokens
    if longest > spec.max_model_len:
        # Routers accept what all workers can hold; this one joined later, with a smaller limit.
        problem = f"with {request.context_tokens} tokens of context it exceeds max_model_len {spec.max_model_len}"
        raise InvalidReservation("max_new_tokens", problem, request.max_new_tokens)
    tokens = request.context_tokens + min(request.max_new_tokens, reserve_tokens)
    pages = spec.pages_for(tokens)
    whole = spec.pages_for(longest)
    if whole > spec.pages:
        raise InvalidReservation(
            "context_tokens", f"needs {whole} pages, there are {spec.pages}", request.context_tokens
        )
    # If the first choice needs all pages, none is left to spare: pending choices are given back at the commit.
    splits = request.choices > 1 and request.context_tokens % spec.page_size > 0 and pages < spec.pages
    return ReservationSize(tokens, spec.page_size if splits else 0, pages + splits)


def pinnable_digests(request: Reserve) -> PackedDigests:
    """Digests of the leading blocks to pin; empty if the request does not read the cache."""
    return PackedDigests(request.prefix_digests if request.cache.reads else b"")


def _check_digests(spec: EngineSpec, request: Reserve) -> None:
    size, most = len(request.prefix_digests), request.context_tokens // spec.kv_format.block_size
    if size % DIGEST_BYTES:
        raise InvalidReservation("prefix_digests", f"its length must be a multiple of {DIGEST_BYTES} bytes", size)
    if size > most * DIGEST_BYTES:
        problem = f"must have at most one digest for each of the {most} full blocks of the context"
        raise InvalidReservation("prefix_digests", problem, size // DIGEST_BYTES)
    if len(request.cache_salt) > MAX_SALT_BYTES:
        raise InvalidReservation("cache_salt", f"must have at most {MAX_SALT_BYTES} bytes", len(request.cache_salt))


def context_ids(handoff: Handoff) -> abc.Sequence[int]:
    """The token ids of the context: prompt and earlier outputs."""
    return join_ids(handoff.prompt_ids, handoff.output_ids)


def check_handoff(spec: EngineSpec, request: Reserve, handoff: Handoff) -> None:
    """Check that a handoff fits the reservation; raises IncompleteTransfer or InvalidRequest.

    The token ids of its context are not checked here, because they were checked when the handoff was decoded.
    """
    choices = {first.choice_index for first in handoff.first_tokens}
    new_tokens = (handoff.params.max_tokens or 0) - len(handoff.output_ids)
    for what, seen, expected in (
        ("attempt", AttemptKey(handoff.request_id, handoff.attempt), request.key),
        ("context", len(handoff.prompt_ids) + len(handoff.output_ids), request.context_tokens),
        ("first tokens", len(handoff.first_tokens), request.choices),
        ("choices", len(choices), request.choices),
    ):
        if seen != expected:
            raise IncompleteTransfer(f"{request.key}: the handoff's {what} is {seen}, reserved was {expected}")
    if not 1 <= new_tokens <= request.max_new_tokens:
        raise IncompleteTransfer(
            f"{request.key}: the handoff allows {new_tokens} new tokens, reserved was {request.max_new_tokens}"
        )
    handoff.params.check_vocabulary(spec.vocab_size)
    firsts = [first.token.token_id for first in handoff.first_tokens]
    check_token_ids("first_tokens", firsts, spec.vocab_size)
