"""Bodies of HTTP requests: the same values as the parser's, however long the parts are."""

import asyncio
import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from baton.errors import DeadlineExceeded, InvalidRequest
from router.serving import http_body
from router.serving.http_body import BodyTooLarge, parse, receive

CHARACTERS = st.characters(exclude_categories=["Cs"])
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(CHARACTERS) | st.lists(st.integers(0, 2**32 - 1)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(CHARACTERS, max_size=4), inner),
)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | array) else value


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bodies are large, and are read in small pieces."""
    for name, size in (("SMALL_BYTES", 0), ("_LONG", 8), ("_PIECE", 11)):
        monkeypatch.setattr(http_body, name, size)


@pytest.mark.usefixtures("tiny")
def test_a_large_body_is_read_as_a_small_one() -> None:
    @settings(deadline=None, max_examples=200)
    @given(st.dictionaries(st.sampled_from(["a", "bc", "prompt"]), VALUES), st.booleans(), st.sampled_from([None, 1]))
    def check(body: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
        data = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode()
        try:
            found = parse(data)
        except InvalidRequest as error:
            if "token ids must be in" in str(error) or "a name has more" in str(error) or "too long" in str(error):
                return
            raise
        assert plain(found) == body

    check()


@pytest.mark.usefixtures("tiny")
def test_bytes_that_are_no_json_are_refused_and_nothing_else_happens() -> None:
    @settings(deadline=None, max_examples=300)
    @given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u0d8 12\n', max_size=60).map(str.encode))
    def check(data: bytes) -> None:
        try:
            expected = http_body.from_json(data, allow_inf_nan=False)
        except ValueError:
            expected = None
        if isinstance(expected, dict):
            return
        with pytest.raises(InvalidRequest, match=r"^(body|.*: token ids)"):
            parse(data)

    check()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": [1,2,3,4,5,6,7,8,]}',
        b'{"prompt": [1,,2,3,4,5,6,7,8]}',
        b'{"prompt": [1,2,3,4,5,6,7,8',
        b'{"prompt": "abcdefghijklmnop',
        b'{"prompt": "abcdefghijk\\',
        b'{"prompt": "abcdefghij\\ud83d"}',
        b'{"prompt": "abcdefghij\\x"}',
        b'{"prompt": "abcdefghij\xff"}',
        b'{"prompt": "abcdefghij\n"}',
        b'{"prompt": [1 2 3 4 5 6 7 8]}',
        b'{"prompt": [000000000000001]}',
        b"[1,2,3,4,5,6,7,8,9,10,11,12]",
        b"{}{}",
        b"",
    ],
)
def test_bad_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^body: "):
        parse(data)


@pytest.mark.usefixtures("tiny")
def test_ids_beyond_their_range_are_refused_by_the_name_of_their_field() -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: token ids must be in \[0, 4294967296\)$"):
        parse(b'{"n":1,"prompt":[1,2,3,4294967296]}')


def test_a_large_body_is_read_in_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the parser holds the interpreter's lock."""
    sizes: list[int] = []

    def measured(data: bytes, **options: Any) -> Any:
        sizes.append(len(data))
        return http_body_parser(data, **options)

    http_body_parser = http_body.from_json
    monkeypatch.setattr(http_body, "from_json", measured)
    text, ids = 'größe \n"日本" \U0001f600' * 100_000, list(range(300_000))
    assert plain(parse(json.dumps({"a": [text, ids], "b": text}).encode())) == {"a": [text, ids], "b": text}
    assert sum(sizes) > 5 << 20
    assert max(sizes) <= 33 << 10


def test_a_body_of_too_many_values_is_refused_before_they_are_made() -> None:
    for data in (b'{"a":[' + b"[]," * 40_000 + b"[]]}", b'{"a":[' + b"1.5," * 40_000 + b"1]}"):
        with pytest.raises(InvalidRequest, match=r"^body: has more than 32768 values$"):
            parse(data)


async def test_a_body_is_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(*messages: dict[str, Any]) -> Any:
        waiting = iter(messages)

        async def take() -> dict[str, Any]:
            for message in waiting:
                return message
            await asyncio.Event().wait()
            raise AssertionError

        return take

    piece = {"type": "http.request", "body": b"abc", "more_body": True}
    last = {**piece, "more_body": False}
    assert await receive(source(piece, last), None, 6) == b"abcabc"
    with pytest.raises(BodyTooLarge, match="more than the 5 bytes"):
        await receive(source(piece, last), None, 5)
    with pytest.raises(BodyTooLarge, match="has 6 bytes"):
        await receive(source(), "6", 5)
    with pytest.raises(ClientDisconnect):
        await receive(source(piece, {"type": "http.disconnect"}), "6", 6)
    monkeypatch.setattr(http_body, "RECEIVE_S", 0.01)
    with pytest.raises(DeadlineExceeded, match="3 bytes came"):
        await receive(source(piece), None, 6)
