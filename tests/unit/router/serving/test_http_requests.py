"""Fields of the HTTP API, beside those that its page names."""

import re
from pathlib import Path

from router.serving.http_requests import (
    REFUSED,
    WITHOUT_EFFECT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

PAGE = (Path(__file__).parents[4] / "docs/http.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f" {title}\n")[2].partition("\n#")[0]


def fields(text: str) -> list[str]:
    """The names in the first column of a table."""
    return [name for cell in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)]


def test_the_page_names_all_fields_and_no_others() -> None:
    both, completions, chats = re.split(r"\nOnly `[/\w]+` has these:\n", section("Fields of completions"))
    assert sorted(fields(both) + fields(completions)) == sorted(CompletionBody.model_fields)
    assert sorted(fields(both) + fields(chats)) == sorted(ChatBody.model_fields)
    tokenizing = section("Fields of completions").rpartition("`/tokenize` has ")[2]
    named = set(re.findall(r"`(\w+)`", tokenizing))
    assert named == set(TokenizeBody.model_fields) | set(DetokenizeBody.model_fields)


def test_the_page_names_fields_without_effect_and_refused_ones() -> None:
    assert re.findall(r"`(\w+)`", section("Fields without effect")) == sorted(WITHOUT_EFFECT)
    assert re.findall(r"`(\w+)`", section("Refused fields")) == sorted(REFUSED)
    served = set(CompletionBody.model_fields) | set(ChatBody.model_fields)
    assert served & set(REFUSED) == {"echo"}
    assert not (served | set(REFUSED)) & set(WITHOUT_EFFECT)
