"""The end of a prompt, as one more block of the prefix cache: so a prompt that is asked again is not computed at all.

    payload = KV of the n tokens after the last full block ‖ hidden state ‖ zeros

The KV is laid out as a block of n tokens, fewer than a block has, and maybe none. The hidden state is the last token's,
before the final norm, from which the prompt's first token is sampled (`Engine.sample`). A payload is as long as a
block's, so every tier keeps it like one, under a name of its own (`baton.kv.hashing.end_digest`).
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.kv.prefix.contract import Payload


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """What follows a prompt's last full block: KV of its tokens, empty if there are none, and the hidden state."""

    kv: Payload
    hidden: Payload

    def pack(self, block_bytes: int) -> bytes:
        """The payload, of `block_bytes`, into which it must fit."""
        return b"".join((self.kv, self.hidden)).ljust(block_bytes, b"\0")

    @classmethod
    def unpack(cls, payload: Payload, kv_bytes: int, hidden_bytes: int) -> PromptEnd:
        """What `pack` packed, as views, given how long its parts are."""
        view = memoryview(payload)
        return cls(view[:kv_bytes], view[kv_bytes : kv_bytes + hidden_bytes])
