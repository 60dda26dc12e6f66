"""A checkpoint's tokenizer and chat template, using only `tokenizers` and `jinja2`.

`Tokenizer.load` reads `tokenizer.json`, `tokenizer_config.json` and the chat template (`chat_template.jinja`, or the
`chat_template` key of older checkpoints, a string or a list of named ones). Chats are rendered as transformers'
`apply_chat_template` renders them. Process long texts on a thread: `encode` and `decode` release the GIL, because they
call the batch functions of `tokenizers`; its other functions do not release it.

`Detokenizer` makes text from tokens as they come. It returns only whole characters, and all pieces together equal the
text that is decoded at once.

`tokenizers.decoders.DecodeStream` does not guarantee that: it has no flush, so a text that ends within a character
loses its end, and it fails on a run of byte tokens that stops being UTF-8. There are two ways here:

* **Byte-level BPE** (GPT-2, Llama 3, Qwen): every token is a run of bytes, so an incremental UTF-8 decoder suffices.
* **Anything else** (SentencePiece-like): decode a window with and without the new tokens, and emit the difference. The
window starts at the last tokens that gave text, because decoders treat the first token in a special way. A run of
byte-fallback tokens becomes characters or U+FFFD as a whole, so it is kept until another token ends it.

Each token is decoded at most twice, so the work for each token is constant.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import InvalidRequest, ModelError

# Threads of the library do nothing for one text at a time, and it panics where it can't start them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_NORMALIZED_SHRINK = 4
"""The number of bytes of text that a normalizer may turn into one; NFC's worst is 3."""


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], chat_template: str | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = _special_tokens(config)
        self._chat_template = chat_template
        self.vocabulary = Vocabulary(backend)
        """The facts about each token that incremental decoding needs."""
        shrink = 1 if backend.normalizer is None else _NORMALIZED_SHRINK
        self.longest_token = shrink * self.vocabulary.longest_token
        """Most bytes of text that one token can stand for."""

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read a checkpoint directory; raises ModelError naming the file that is missing or unreadable."""
        folder = Path(directory)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{path} can't be read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        legacy = _read_json(folder / "special_tokens_map.json")
        return cls(backend, {**legacy, **config}, _template(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a text, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def chat_template(self) -> str | None:
        """The template that renders chats."""
        return self._chat_template

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of special tokens by their names, such as "eos_token"."""
        return self._special_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that the post-processor adds."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids without a token are left out, bytes that are not UTF-8 become U+FFFD."""
        (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental decoder, whose pieces together equal `decode`."""
        return self.vocabulary.detokenizer(skip_special_tokens=skip_special_tokens)

    def check_size(self, field: str, size: int, max_tokens: int) -> None:
        """Raise InvalidRequest naming the sizes if `size` bytes of text need more than `max_tokens`."""
        if size > (limit := max_tokens * self.longest_token):
            raise InvalidRequest(
                field,
                f"{size} bytes can't fit: {max_tokens} tokens of at most {self.longest_token} bytes hold {limit} bytes",
            )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The conversation as one text that includes special tokens; encode it without adding them again.

        `arguments` are further variables for the template, and may replace those of special tokens.
        Raises InvalidRequest if there is no template, or with the error that the template raises.
        """
        if self._chat_template is None:
            raise InvalidRequest("chat", "the model has no chat template; send text or token_ids")
        try:
            rendered: str = self._compiled.render(
                {**self._special_tokens, **arguments},
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            return rendered
        except TemplateError as error:
            raise InvalidRequest("chat", f"the chat template rejects it: {error.message or error}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidRequest("chat", f"the chat template fails on it: {error}") from error

    @cached_property
    def _compiled(self) -> Any:
        return _environment().from_string(self._chat_template or "")


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks words for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the statements between the two tags; variables that they set are local to them."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} can't be read: {error}") from error
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder}: chat_template must be a text or a list of named texts, got {template!r}")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The `*_token` entries of a configuration: texts such as "<s>", or objects with the text as "content"."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


_SPACE = "\u2581"
"""SentencePiece's character for a space."""
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

    def spelled(self, token_id: int) -> bytes:
        """Bytes that a token adds within a text; none for an id without a token."""
        if self._byte_level:
            return self.token_bytes(token_id)
        token = self.token(token_id) or ""
        return bytes([int(token[3:5], 16)]) if self.is_byte(token) else token.replace(_SPACE, " ").encode()

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
    """Types of a decoder and of all its parts, as `tokenizer.json` names them."""
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
