"""When a request that comes now can have its first token, by what is known. Pure.

    the line's pace x the requests before it, or the tokens pending at the least busy prefill worker, whichever is more
    + the prompt's tokens over the fastest rate

Unknown rates count as nothing, so the estimate errs on the side of accepting.
"""

from __future__ import annotations

from baton.errors import Overloaded
from router.policy import Fleet


def first_token_s(fleet: Fleet, *, tokens: int, line_s: float) -> float:
    """Seconds until the first token of a prompt of `tokens`, after a wait in the line of `line_s`."""
    known = [prefill for prefill in fleet.prefill if prefill.rate > 0 and not prefill.draining]
    if not known or any(p.rate <= 0 and not p.draining for p in fleet.prefill):
        return line_s
    pending = min(max(prefill.pending_tokens, prefill.own_tokens) / prefill.rate for prefill in known)
    return max(line_s, pending) + tokens / max(prefill.rate for prefill in known)


def check_deadline(expected_s: float, remaining_s: float, retry_after: float) -> None:
    """Raise Overloaded when the first token is expected after the deadline."""
    if expected_s > remaining_s:
        raise Overloaded(
            f"the deadline is in {remaining_s:.1f} s, the first token is expected in {expected_s:.1f} s", retry_after
        )
