"""`baton generate` against a router that is played by a small servicer."""

import asyncio
import json
import math
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import baton.cli.generate
from baton.cli.main import main
from baton.errors import DeadlineExceeded, EngineError, InvalidRequest, NotFound, Overloaded, Unavailable
from baton.pb import inference_pb2 as pb
from baton.request import PARAMETERS, Sampling, SamplingParams
from baton.rpc.convert import sampling_from_proto
from tests.fake_router import Router, served


async def generate(router: Router, *arguments: str) -> Result:
    async with served(router) as listener:
        command = ["generate", f"--target={listener.address}", *arguments]
        return await asyncio.to_thread(CliRunner().invoke, main, command)


async def test_text_streams_and_the_account_follows() -> None:
    result = await generate(Router(), "hello", "--max-tokens=3", "--temperature=0")
    assert (result.exit_code, result.stdout) == (0, "ab\n")
    assert "slot wait" in result.stderr
    account = "prompt 3 tokens (2 cached: 1 from pool, 1 from Redis; 2 held by decode), completion 3 tokens"
    assert account in result.stderr


async def test_json_is_one_object_with_all_choices() -> None:
    result = await generate(Router(), "hello", "--json", "--logprobs=1", "-n", "2")
    answer = json.loads(result.stdout)
    assert result.stderr == ""
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("ab", [1, 2], "stop")
    assert answer["logprobs"][0] == {"token_id": 1, "logprob": -0.5, "top": [{"token_id": 1, "logprob": -0.5}]}
    cached = {"pool": 1, "host": 0, "redis": 1, "peer": 0, "decode": 2}
    assert answer["usage"] == {"prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": 3, "cached": cached}
    assert answer["timings_ms"]["total"] == 5
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "xy"]


async def test_several_choices_are_shown_whole() -> None:
    result = await generate(Router(), "hello", "-n", "2", "--quiet")
    assert (result.stdout, result.stderr) == ("[0] ab\n[1] xy\n", "")


@pytest.mark.parametrize("flags", [(), ("--json",), ("--quiet",)])
async def test_a_completion_without_text_says_where_its_tokens_are(flags: tuple[str, ...]) -> None:
    """As of a model without a tokenizer."""

    class Silent(Router):
        async def Generate(self, request: pb.GenerateRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
            tokens = [pb.TokenInfo(token_id=2)]
            yield pb.GenerateResponse(choices=[pb.ChoiceDelta(tokens=tokens, finish_reason=pb.FINISH_REASON_LENGTH)])

    result = await generate(Silent(), "--token-ids=5", *flags)
    assert result.exit_code == 0
    assert ("no text: the model has no tokenizer" in result.stderr) == (not flags)


PROGRESS = [
    pb.PrefillProgress(tokens_done=1_000, tokens_total=1_000_000),
    pb.PrefillProgress(tokens_done=2_000, tokens_total=1_000_000, tokens_per_second=math.inf, seconds_left=math.nan),
    pb.PrefillProgress(tokens_done=500_000, tokens_total=1_000_000, tokens_per_second=4000.4, seconds_left=200.2),
    pb.PrefillProgress(tokens_done=1_000_000, tokens_total=1_000_000, tokens_per_second=3000, seconds_left=0),
]


async def on_terminal(monkeypatch: pytest.MonkeyPatch, router: Router, *arguments: str, after_s: float = 0.0) -> str:
    """Output on a terminal of a request whose prompt takes a while."""
    router.progress = PROGRESS
    shown, terminal = pty.openpty()
    with os.fdopen(shown, "rb", buffering=0) as screen, os.fdopen(terminal, "w") as stream:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            patch.setattr(baton.cli.generate, "BAR_AFTER_S", after_s)
            patch.setenv("TERM", "xterm")
            patch.setenv("COLUMNS", "100")
            async with served(router) as listener:
                command = ["generate", f"--target={listener.address}", "hello", *arguments]
                await asyncio.to_thread(main, command, standalone_mode=False)
        stream.write("the end")
        stream.flush()
        # Written text reaches the other end a moment later.
        seen = screen.read(1 << 16)
        while not seen.endswith(b"the end"):
            seen += screen.read(1 << 16)
        return seen.decode()


async def test_a_long_prompt_has_a_progress_bar_until_its_output_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = await on_terminal(monkeypatch, Router())
    assert "1,000/1,000,000 tokens" in seen
    assert "2,000/1,000,000 tokens\r" in seen
    assert "500,000/1,000,000 tokens, 4,000/s, 0:03:20 left" in seen
    assert "1,000,000/1,000,000 tokens, 3,000/s, 0:00:00 left" in seen
    show_cursor, erase_line = "\x1b[?25h", "\x1b[2K"
    bar, _, rest = seen.rpartition(erase_line)
    assert show_cursor in bar
    assert rest.startswith("ab\r\n")
    assert "slot wait" in rest


@pytest.mark.parametrize("flag", ["--json", "--quiet"])
async def test_no_bar_where_it_is_not_wanted(router: Router, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    shown = await on_terminal(monkeypatch, router, flag)
    assert "\x1b" not in shown
    assert shown.endswith("the end")
    assert not router.seen[0].report_progress


async def test_a_short_prompt_has_no_bar(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1,000,000" not in await on_terminal(monkeypatch, router, after_s=600)
    assert router.seen[0].report_progress


async def test_no_bar_without_a_terminal(router: Router) -> None:
    router.progress = PROGRESS
    result = await generate(router, "hello")
    assert "1,000,000" not in result.stderr
    assert not router.seen[0].report_progress


def test_each_parameter_has_a_field_of_the_message_a_keyword_of_the_client_and_a_flag() -> None:
    names = set(PARAMETERS)
    assert names == set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == set(Sampling.__annotations__)
    assert names <= {param.name for param in main.commands["generate"].params}


async def test_every_flag_reaches_the_request(router: Router) -> None:
    flags = (
        "--max-tokens=5 --min-tokens=2 --temperature=0.5 --top-p=0.5 --top-k=3 --min-p=0.25 --repetition-penalty=1.5"
        " --presence-penalty=-1 --frequency-penalty=2 --logit-bias 5 -100 --logit-bias 7 2.5 --seed=7 --stop=x --stop=y"
        " --stop-token-ids=1,2 --ignore-eos --logprobs=1 --prompt-logprobs=2 --n 4 --allowed-token-ids=3,4"
        " --no-skip-special-tokens --include-stop-in-output --json --model=tiny --cache=write --cache-salt=s"
    )
    await generate(router, "hello", *flags.split())
    request = router.seen[0]
    assert (request.model, request.text) == ("tiny", "hello")
    assert (request.cache, request.cache_salt) == (pb.CACHE_POLICY_WRITE, "s")
    wanted = SamplingParams(max_tokens=5, min_tokens=2, temperature=0.5, top_p=0.5, top_k=3, min_p=0.25, seed=7, n=4)
    wanted = replace(wanted, repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=2, ignore_eos=True)
    wanted = replace(wanted, stop=("x", "y"), stop_token_ids=(1, 2), logit_bias=((5, -100), (7, 2.5)), logprobs=1)
    wanted = replace(wanted, prompt_logprobs=2, allowed_token_ids=(3, 4), skip_special_tokens=False)
    assert sampling_from_proto(request.sampling) == replace(wanted, include_stop_in_output=True)


async def test_the_other_forms_of_a_prompt(router: Router, tmp_path: Path) -> None:
    text, chat = tmp_path / "prompt.txt", tmp_path / "chat.json"
    text.write_text("héllo\n", encoding="utf-8")
    chat.write_text(json.dumps([{"role": "user", "content": "hi"}]))
    for flag in (f"--prompt-file={text}", f"--chat={chat}", "--token-ids=1,2,3"):
        assert (await generate(router, flag)).exit_code == 0
    assert router.seen[0].text == "héllo\n"
    assert router.seen[1].chat.messages[0].content == "hi"
    assert list(router.seen[2].token_ids.ids) == [1, 2, 3]


async def test_a_refusal_is_shown_with_its_status(router: Router) -> None:
    router.error = Overloaded("the queue holds 64 of 64")
    result = await generate(router, "hello")
    assert result.exit_code == 75
    assert result.stderr == "error: RESOURCE_EXHAUSTED: the queue holds 64 of 64\n"
    router.error = Overloaded("the queue holds 64 of 64", retry_after=5)
    result = await generate(router, "hello")
    assert result.stderr == "error: RESOURCE_EXHAUSTED: the queue holds 64 of 64 (try again in 5 s)\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("n", "must be 1", 2), 2),
        (NotFound("model 'x' is not served"), 1),
        (Unavailable("no worker of role decode"), 75),
        (DeadlineExceeded("the request had 5 s"), 124),
        (EngineError("NaN"), 1),
    ],
)
async def test_scripts_can_tell_failures_apart(router: Router, error: Exception, status: int) -> None:
    router.error = error
    result = await generate(router, "hello")
    assert result.exit_code == status
    assert str(error) in result.stderr


@pytest.mark.parametrize("timeout", ["nan", "inf", "1e300", "0", "-1", "soon"])
@pytest.mark.parametrize("command", [["generate", "x"], ["ledger"]])
def test_a_timeout_that_is_none_is_refused(command: list[str], timeout: str) -> None:
    result = CliRunner().invoke(main, [*command, f"--timeout={timeout}"])
    assert result.exit_code == 2
    assert "'--timeout': must be a number of seconds" in result.stderr


@pytest.mark.parametrize(
    ("content", "flag", "part"),
    [
        (b"ok \xff", "--prompt-file", "not valid UTF-8 at byte 3 (0xff)"),
        (b"{", "--chat", "not JSON"),
        (b"[]", "--chat", "list"),
        (b'{"role": "user"}', "--chat", "list"),
        (None, "--prompt-file", "No such file"),
    ],
)
def test_a_bad_file_is_named(content: bytes | None, flag: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "input"
    if content is not None:
        file.write_bytes(content)
    result = CliRunner().invoke(main, ["generate", f"{flag}={file}"])
    assert result.exit_code == 2
    assert flag in result.stderr
    assert str(file) in result.stderr
    assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("hello --token-ids=1", "give one of PROMPT"),
        ("--token-ids=1,x", "token_ids[1]: must be a number of at least 0, got 'x'"),
        ("hello --stop-token-ids=-1", "stop_token_ids[0]: must be a number of at least 0, got '-1'"),
        ("hello --logprobs=1", "--logprobs needs --json"),
    ],
)
def test_bad_arguments_of_generate_exit_2(arguments: str, words: str) -> None:
    result = CliRunner().invoke(main, ["generate", *arguments.split()])
    assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


def test_ctrl_c_while_modules_load_ends_quietly() -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "import baton.__main__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


async def test_ctrl_c_cancels_and_exits_130(router: Router) -> None:
    router.hang = True
    async with served(router) as listener:
        command = ["-m", "baton", "generate", "--target", listener.address, "hello"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        assert await process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 130
        await asyncio.wait_for(router.closed.wait(), 60)
