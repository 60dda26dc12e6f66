"""Pieces never hold half a character and together equal decoding at once, for any tokens."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from baton.tokenizer import Tokenizer, Vocabulary


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġthe", "ä¸Ń", "ðŁĺ", "Ċĉ", "Ġ", "é"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys([*alphabet, *words]))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|中文|>", special=True)])
    backend.add_tokens([AddedToken("naïve €", special=False)])
    return backend


def sentencepiece(*, strip: bool = True) -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in ["▁", "▁▁", "▁Hello", "▁the", "a", "b", "é", "中", "\n", "�", ",", "▁�"]:
        vocab[word] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    vocab = {word: i for i, word in enumerate(["<unk>", "▁", "▁Hello", "▁the", "a", "é", "中", "▁▁a", "</s>"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return backend


def no_decoder() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))


KINDS = {
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece(),
    "gemma-like": sentencepiece(strip=False),
    "metaspace": metaspace(),
    "no decoder": no_decoder(),
}
TOKENIZERS = {name: Tokenizer(backend, {}, None) for name, backend in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
def test_pieces_together_equal_decoding_at_once(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    # Two ids past the end stand for a model whose embedding is padded beyond its tokenizer.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@given(text=st.text(max_size=20))
def test_pieces_of_valid_text_are_whole_characters(kind: str, text: str) -> None:
    backend = KINDS[kind]
    to_token = _byte_token_names(kind)
    ids = [backend.token_to_id(to_token[byte]) for byte in text.encode()]
    detokenizer = TOKENIZERS[kind].detokenizer()
    shown = ""
    for token_id in ids:
        shown += detokenizer.push(token_id)
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == TOKENIZERS[kind].decode(ids)


def test_a_character_is_shown_with_its_last_byte() -> None:
    names = _byte_token_names("byte-level")
    detokenizer = TOKENIZERS["byte-level"].detokenizer()
    ids = [KINDS["byte-level"].token_to_id(names[byte]) for byte in "é€x".encode()]
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "é", "", "", "€", "x"]


def test_an_unfinished_character_comes_with_the_flush() -> None:
    names = _byte_token_names("byte-level")
    detokenizer = TOKENIZERS["byte-level"].detokenizer()
    assert detokenizer.push(KINDS["byte-level"].token_to_id(names["é".encode()[0]])) == ""
    assert detokenizer.flush() == "�"


@pytest.mark.parametrize(
    ("kind", "token"),
    [("byte-level", "ÿ"), ("sentencepiece", "<0xFF>"), ("sentencepiece", "▁the"), ("metaspace", "▁the")],
)
def test_work_per_token_does_not_grow(kind: str, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    token_id, decode, decoded = KINDS[kind].token_to_id(token), Vocabulary.decode, 0

    def counted(self: Vocabulary, token_ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return decode(self, token_ids)

    monkeypatch.setattr(Vocabulary, "decode", counted)
    detokenizer = TOKENIZERS[kind].detokenizer()
    for _ in range(2000):
        detokenizer.push(token_id)
    detokenizer.flush()
    assert decoded <= 3 * 2000


def _byte_token_names(kind: str) -> list[str]:
    if kind == "sentencepiece":
        return [f"<0x{byte:02X}>" for byte in range(256)]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]
