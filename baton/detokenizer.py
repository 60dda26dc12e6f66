"""Text from tokens as they come: only whole characters, and all pieces together equal the text decoded at once.

`tokenizers.decoders.DecodeStream` does not guarantee that: it has no flush, so a text that ends within a character
loses its end, and it fails on a run of byte tokens that stops being UTF-8. There are two ways here:

* **Byte-level BPE** (GPT-2, Llama 3, Qwen): every token is a run of bytes, so an incremental UTF-8 decoder suffices. *
**Anything else** (SentencePiece-like): decode a window with and without the new tokens, and emit the difference. The
window starts at the last tokens that gave text, because decoders treat the first token in a special way. A run of
byte-fallback tokens becomes characters or U+FFFD as a whole, so it is kept until another token ends it.

Each token is decoded at most twice, so the work for each token is constant.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """The decoder of one text."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is complete now, which may be empty."""

    def flush(self) -> str:
        """Return the text that was kept back; the text ends here."""


class Vocabulary:
    """The part of a tokenizer that incremental decoding needs, shared by all its detokenizers."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        kinds = _kinds(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {})
        self._byte_level = kinds - {"Sequence", "Fuse"} == {"ByteLevel"}
        self._byte_fallback = "ByteFallback" in kinds
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}
        size = len if self._byte_level else _utf8_size
        self.longest_token = max(map(size, backend.get_vocab(with_added_tokens=True)), default=1)
        """Bytes of the longest token."""

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer at the start of a text."""
        skipped = self._special if skip_special_tokens else frozenset()
        return _ByteLevelDecoder(self, skipped) if self._byte_level else _WindowDecoder(self, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary; none for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token(token_id) or ""
            try:
                found = bytes(_BYTES_OF[char] for char in token)
            except KeyError:
                found = token.encode()
            self._bytes[token_id] = found
        return found

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def is_byte(self, token: str) -> bool:
        """Whether the token is one byte of a run that is decoded as a whole."""
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(token) is not None

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))


class _ByteLevelDecoder:
    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._emitted: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._vocabulary.token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        return "" if self._vocabulary.is_byte(token) else self._emit()

    def flush(self) -> str:
        return self._emit() if self._pending else ""

    def _emit(self) -> str:
        before = self._vocabulary.decode(self._emitted)
        piece = self._vocabulary.decode(self._emitted + self._pending)[len(before) :]
        if piece:
            self._emitted, self._pending = self._pending, []
        return piece


def _kinds(decoder: dict[str, object]) -> set[object]:
    """Types of a decoder and all that it consists of, as `tokenizer.json` names them."""
    inner = decoder.get("decoders")
    return {decoder.get("type")}.union(*(map(_kinds, inner) if isinstance(inner, list) else ()))


def _utf8_size(text: str) -> int:
    return len(text.encode())


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES_OF = _byte_characters()
