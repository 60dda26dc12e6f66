"""Loading, chat rendering beside transformers, and what is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from baton.errors import InvalidRequest, ModelError
from baton.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELPERS = """{{- bos_token }} {{ strftime_now("%d %b %Y") }} {{ tools is none }}
{%- if messages|length == 2 %}{{ raise_exception('Roles must alternate!') }}{% endif %}
{% set ns = namespace(n=0) %}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% if m.role == 'halt' %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
  {% generation %}
    {{ m | tojson }} {{ m.content | tojson(indent=2) }}
  {% endgeneration %}
{% endfor %}
{{ ns.n }} {{ pad_token }} {{ eos_token }}"""
TEMPLATES = {"chatml": CHATML, "helpers": HELPERS}
CHATS = {
    "one": [("user", "Hello, wörld <b>&'\"")],
    "system": [("system", "  Be brief.\n"), ("user", " Why? ")],
    "turns": [("user", "a"), ("assistant", "b"), ("user", "日本語\n\n")],
    "control": [("user", "a"), ("skip", "b"), ("user", "c"), ("halt", "d"), ("user", "e")],
}


def checkpoint(folder: Path, template: object = None, *, jinja: str | None = None) -> Path:
    vocab = {word: i for i, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(3)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken", "special": True},
        "eos_token": "</s>",
        "unk_token": None,
    }
    if template is not None:
        config["chat_template"] = template
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_renders_as_transformers_does(tmp_path: Path, name: str, chat: str, generate: bool) -> None:
    folder = checkpoint(tmp_path, jinja=TEMPLATES[name])
    messages = [{"role": role, "content": content} for role, content in CHATS[chat]]
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    try:
        wanted = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    except Exception as refusal:
        with pytest.raises(InvalidRequest, match=str(refusal)):
            tokenizer.render_chat(messages, add_generation_prompt=generate)
    else:
        rendered = tokenizer.render_chat(messages, add_generation_prompt=generate)
        assert rendered == wanted
        ids = reference(wanted, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(rendered, add_special_tokens=False) == ids


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"enable_thinking": "no", "bos_token": "B"}])
def test_arguments_of_a_template_are_those_of_transformers(tmp_path: Path, arguments: dict[str, Any]) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}"
    folder, messages = checkpoint(tmp_path, jinja=template), [{"role": "user", "content": "x"}]
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = reference.apply_chat_template(messages, tokenize=False, **arguments)
    assert Tokenizer.load(folder).render_chat(messages, arguments=arguments) == wanted


NAMED = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]


@pytest.mark.parametrize("template", [CHATML, NAMED])
def test_old_places_of_the_template(tmp_path: Path, template: object) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path, template))
    assert tokenizer.render_chat([{"role": "system", "content": "hi"}], add_generation_prompt=False) == (
        "<|im_start|>system\nhi<|im_end|>\n"
    )


def test_the_file_beats_the_key(tmp_path: Path) -> None:
    assert Tokenizer.load(checkpoint(tmp_path, "old", jinja="new")).render_chat([]) == "new"


def test_encode_adds_special_tokens_unless_they_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path))
    assert tokenizer.decode(tokenizer.encode("abcdef"), skip_special_tokens=False) == "<s>abcdef"
    assert tokenizer.decode(tokenizer.encode("abcdef", add_special_tokens=False)) == "abcdef"


def test_chat_is_refused_if_the_model_has_no_chat_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="chat: the model has no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content + 1 }}", "{{ messages[5].content.x }}", "{% if %}", "{{ ''.__class__.mro() }}"]
)
def test_template_errors_are_the_requests(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^chat: the chat template"):
        Tokenizer.load(checkpoint(tmp_path, jinja=template)).render_chat([{"role": "user", "content": "x"}])


async def test_long_texts_leave_the_event_loop_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path))
    text = "what is that? " * 50_000
    ids = tokenizer.encode(text)
    for work in (lambda: tokenizer.encode(text), lambda: tokenizer.decode(ids)):
        turns = 0
        working = asyncio.create_task(asyncio.to_thread(work))
        while not working.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10


def test_a_text_that_cannot_fit_is_refused_by_its_size(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path))
    assert tokenizer.longest_token == len("</s>")
    tokenizer.check_size("text", 400, 100)
    with pytest.raises(InvalidRequest, match=r"text: 401 bytes can't fit: 100 tokens of at most 4 bytes"):
        tokenizer.check_size("text", 401, 100)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    folder = checkpoint(tmp_path)
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(ModelError, match=name):
        Tokenizer.load(folder)
