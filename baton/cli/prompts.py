"""Prompts in files: text, a conversation, or one prompt a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from baton.completion import Prompt
from baton.errors import InvalidRequest, preview
from baton.rpc import requests

_FORMS = {
    "text": "a text that is not empty",
    "token_ids": "a list of token ids that is not empty",
    "messages": "a list of {role, content} that is not empty",
}
_SHOWN = 5


def read_text(flag: str, file: Path) -> str:
    """The content of the file that `flag` names; raises click.BadParameter."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise bad(flag, f"{str(file)!r} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise bad(flag, f"{str(file)!r} is not valid UTF-8 at byte {error.start} (0x{byte:02x})") from None


def read_messages(file: Path) -> list[dict[str, str]]:
    """The conversation in the file of --chat: a JSON list of {role, content}; raises click.BadParameter."""
    try:
        messages = json.loads(read_text("--chat", file))
    except (ValueError, RecursionError) as error:
        raise bad("--chat", f"{str(file)!r} is not JSON: {error}") from None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise bad("--chat", f"{str(file)!r} must hold a list of {{role, content}}")
    return messages


def read_prompts(file: Path) -> dict[int, Prompt]:
    """The prompts in the file of --prompt-file by their lines, from 1.

    A .jsonl file has one a line, any other file is one as a whole. A line of .jsonl is an object with one of text,
    token_ids and messages; empty lines are passed over. Raises click.BadParameter naming each line that can't be a
    prompt.
    """
    text = read_text("--prompt-file", file)
    if file.suffix != ".jsonl":
        lines: dict[int, Any] = {1: text} if text else {}
    else:
        # Not `splitlines`: strings may contain other characters that Unicode treats as the end of a line.
        lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    found, problems = {}, []
    for number, line in lines.items():
        try:
            found[number] = _checked(line if file.suffix != ".jsonl" else _prompt(line))
        except InvalidRequest as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise bad("--prompt-file", f"{str(file)!r}, {'; '.join(problems[:_SHOWN])}{more}")
    if not found:
        raise bad("--prompt-file", f"{str(file)!r} holds no prompt")
    return found


def bad(flag: str, problem: str) -> click.BadParameter:
    """The refusal of what a flag says."""
    return click.BadParameter(problem, param_hint=f"'{flag}'")


def _prompt(line: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("prompt", f"is not JSON: {error}") from None
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= _FORMS.keys():
        raise InvalidRequest("prompt", f"must be an object with one of {', '.join(_FORMS)}, got {preview(value)}")
    ((form, prompt),) = value.items()
    kind = str if form == "text" else list
    if not isinstance(prompt, kind) or not prompt or (form != "text" and _is_chat(prompt) != (form == "messages")):
        raise InvalidRequest(form, f"must be {_FORMS[form]}, got {preview(prompt)}")
    return prompt


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt[0], dict)


def _checked(prompt: Prompt) -> Prompt:
    """The prompt, once it is known that a client would send it."""
    requests.generate_request("", prompt, {})
    return prompt
