"""What a reservation takes, and whether it can ever be granted. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.contract import EngineSpec
from baton.errors import InvalidRequest
from baton.kv.hashing import DIGEST_BYTES
from baton.request import MAX_CACHE_SALT_BYTES, MAX_CHOICES
from decode_svc.messages import Reserve


class Refused(InvalidRequest):
    """A reservation that can never be granted; the message says why, with numbers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a reservation takes: room for the tokens of one choice, and for those of the context that forks can't share.

    `pages` are all of them, also those that turn out to be shared with others; these need not be free.
    """

    tokens: int
    spare_tokens: int
    pages: int


def sizes(spec: EngineSpec, request: Reserve, reserve_tokens: int) -> Sizes:
    """Size a reservation of `reserve_tokens` outputs at most.

    Raises Refused when the request is malformed, or when one choice alone could never be generated to its end.
    """
    for name, value, limit in (
        ("context_tokens", request.context_tokens, spec.max_model_len - 1),
        ("max_new_tokens", request.max_new_tokens, None),
        ("choices", request.choices, MAX_CHOICES),
    ):
        if value < 1 or (limit is not None and value > limit):
            raise Refused(name, "must be at least 1" + (f" and at most {limit}" if limit else ""), value)
    _check_names(spec, request)
    tokens = min(request.context_tokens + min(request.max_new_tokens, reserve_tokens), spec.max_model_len)
    pages = spec.pages_for(tokens)
    whole = spec.pages_for(min(request.context_tokens + request.max_new_tokens, spec.max_model_len))
    if whole > spec.pages:
        raise Refused("context_tokens", f"needs {whole} pages, there are {spec.pages}", request.context_tokens)
    # Where the first choice needs all pages, there is none to spare: what is pending is given back at the commit.
    splits = request.choices > 1 and request.context_tokens % spec.page_size > 0 and pages < spec.pages
    return Sizes(tokens, spec.page_size if splits else 0, pages + splits)


def pinnable(request: Reserve) -> list[bytes]:
    """Digests of the leading blocks to be pinned: none if the request does not read the cache."""
    names = request.prefix_digests if request.cache.reads else b""
    return [names[start : start + DIGEST_BYTES] for start in range(0, len(names), DIGEST_BYTES)]


def _check_names(spec: EngineSpec, request: Reserve) -> None:
    size, most = len(request.prefix_digests), request.context_tokens // spec.kv_format.block_size
    if size % DIGEST_BYTES:
        raise Refused("prefix_digests", f"must have a multiple of {DIGEST_BYTES} bytes", size)
    if size > most * DIGEST_BYTES:
        problem = f"must name at most the {most} full blocks of the context"
        raise Refused("prefix_digests", problem, size // DIGEST_BYTES)
    if len(request.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise Refused("cache_salt", f"must have at most {MAX_CACHE_SALT_BYTES} bytes", len(request.cache_salt))
