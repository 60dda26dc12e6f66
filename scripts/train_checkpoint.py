"""Train the checkpoint in ``baton/bundled`` on CPython's standard library and write its model card."""

import argparse
import ast
import dataclasses
import hashlib
import math
import os
import pathlib
import platform
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = pathlib.Path(__file__).resolve().parent.parent / "baton" / "bundled"
SIZE_LIMIT = 12_000_000
VOCABULARY, CONTEXT, TOKENS_PER_STEP = 4096, 2048, 4096
# (share of the run from which it applies, window length); length 0 ends the run.
WINDOWS = ((0.0, 256), (0.75, 1024), (0.9, 2048), (1.0, 0))
LEARNING_RATE, WARMUP, DECAY_FROM, WEIGHT_DECAY = 4e-3, 0.02, 0.3, 0.05
SPACE_SPLIT_RATE, HELD_OUT_ONE_IN, EVAL_WINDOW = 0.02, 50, 1024
EXCLUDED_PARTS = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata", "pydoc_data/", "html/entities", "locale", "stringprep")
BOS, EOS, TURN, TURN_END = "<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SAMPLE_PROMPTS = ("def ", "import os\n\n\ndef read_file(path):\n", "class Queue:\n    def __init__(self")

CARD = """\
# Baton's bundled checkpoint

A Llama of {parameters:.1f}M parameters trained from scratch on CPython's standard library, which
`baton up` serves when no model is named. Expect text in the shape of Python, not working programs.

- Architecture: `LlamaForCausalLM`, {c.num_hidden_layers} layers of width {c.hidden_size}, with
  {c.num_attention_heads} query heads and {c.num_key_value_heads} key/value heads of size {c.head_dim};
  MLP width {c.intermediate_size}, tied embeddings, bfloat16, {c.max_position_embeddings} tokens of context.
- Tokenizer: byte-level BPE of {c.vocab_size} entries, trained on the training files; ChatML template.
- Training text: {train_files} files ({train_bytes:,} bytes) of CPython {python}'s standard library
  ([PSF License](https://docs.python.org/3.11/license.html)), without its tests and data tables; and again
  {run.chats:,} functions of those files, each asked for by name or docstring and answered by its source.
- Training: {run.step:,} steps of {step_tokens:,} tokens, {seen:,} in all, or {passes:.1f} passes over the
  text's {run.tokens:,}; {minutes:.0f} minutes on {threads} CPU cores; seed {run.seed}.
- Optimiser: Muon for the matrices inside the layers, AdamW for embeddings and norms; peak learning rate
  {rate}, linear decay; window length {windows}.
- **Held-out loss: {nats:.3f} nats per token, {bits:.3f} bits per byte**, in windows of {eval_window} tokens
  over {held_files} files ({held_bytes:,} bytes) kept out of training, about one in {one_in}, picked by a
  hash of their path: {held_names}.
- Reproduce: `python scripts/train_checkpoint.py --seed {run.seed} --steps {run.step}`{clock}. A run
  paced by the clock follows its schedule unevenly in steps, so the weights will differ from these.

Greedy decoding of at most 64 tokens after four prompts, which are included:

{samples}
"""


@dataclasses.dataclass
class TrainingRun:
    """A run and its progress: by steps when their number is fixed, by the clock otherwise."""

    seed: int
    steps: int | None
    minutes: float
    train: dict[str, str]
    held_out: dict[str, str]
    chats: int
    tokens: int
    step: int = 0
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def elapsed_minutes(self) -> float:
        return (time.monotonic() - self.started) / 60

    @property
    def share(self) -> float:
        return self.step / self.steps if self.steps else self.elapsed_minutes / self.minutes

    @property
    def window(self) -> int:
        return next(length for start, length in reversed(WINDOWS) if self.share >= start)

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATE * min(self.share / WARMUP + 0.01, 1.0, (1.02 - self.share) / (1 - DECAY_FROM))


def read_corpus() -> tuple[dict[str, str], dict[str, str]]:
    """The files to train on and those held out, by their path in the library."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if EXCLUDED_PARTS & set(name.split("/")) or name.startswith(EXCLUDED_PREFIXES):
            continue
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        if (text := path.read_text(encoding="utf-8", errors="ignore")).strip():
            files[digest % HELD_OUT_ONE_IN == 0][name] = text
    return files


def byte_count(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def chats(sources: Iterable[str], rng: np.random.Generator) -> Iterator[str]:
    """Documented functions as one-turn conversations: asked for by docstring, answered by source."""
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
                continue
            body = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
            summary = doc.splitlines()[0].strip()
            if 120 <= len(body) <= 1500 and len(summary) >= 12:
                verbose = f"Write a function that {summary[0].lower()}{summary[1:]}"
                request = (summary, verbose, f"Write the function {node.name}.")[rng.integers(3)]
                yield f"{TURN}user\n{request}{TURN_END}\n{TURN}assistant\n{body}{TURN_END}\n"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, TURN, TURN_END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def split_spaces(stream: np.ndarray, tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    """Spell a few " word" tokens as " " and "word", so that a prompt may end in a space."""
    vocab = tokenizer.get_vocab()
    rest = np.full(len(vocab), -1)
    for token, index in vocab.items():
        if len(token) > 1 and token[0] == "Ġ":
            rest[index] = vocab.get(token[1:], -1)
    at = np.flatnonzero((rng.random(len(stream)) < SPACE_SPLIT_RATE) & (rest[stream] >= 0))
    spelled = stream.copy()
    spelled[at] = vocab["Ġ"]
    return np.insert(spelled, at + 1, rest[stream[at]])


def batches(
    documents: list[list[int]], tokenizer: Tokenizer, run: TrainingRun, rng: np.random.Generator
) -> Iterator[torch.Tensor]:
    """Windows over the shuffled documents, each window begun by BOS, until the run is over."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    while length := run.window:
        joined = np.concatenate([[*documents[i], eos] for i in rng.permutation(len(documents))])
        stream = split_spaces(joined, tokenizer, rng)
        windows = np.resize(stream, (len(stream) // length, length))
        rows = np.insert(windows, 0, bos, axis=1)[rng.permutation(len(windows))]
        per_step = TOKENS_PER_STEP // length
        for start in range(0, len(rows) - per_step + 1, per_step):
            if run.window != length:
                break
            yield torch.from_numpy(rows[start : start + per_step])


def token_losses(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=rows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> tuple[float, float]:
    """Nats per token and bits per byte."""
    bos, total, tokens = tokenizer.token_to_id(BOS), 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for start in range(0, len(ids), EVAL_WINDOW):
            losses = token_losses(model, torch.tensor([[bos, *ids[start : start + EVAL_WINDOW]]]))
            total, tokens = total + losses.sum().item(), tokens + len(losses)
    return total / tokens, total / math.log(2) / byte_count(texts)


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    request = [{"role": "user", "content": "Write a function that returns the size of a file."}]
    chat = tokenizer.apply_chat_template(request, tokenize=False, add_generation_prompt=True)
    blocks = []
    for prompt in (*(BOS + prompt for prompt in SAMPLE_PROMPTS), chat):
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, 1:]
        blocks.append(f"```python\n{tokenizer.decode(output)}\n```")
    return "\n\n".join(blocks)


def card(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, run: TrainingRun) -> str:
    seen, minutes = run.step * TOKENS_PER_STEP, run.elapsed_minutes
    nats, bits = held_out_loss(model, tokenizer.backend_tokenizer, list(run.held_out.values()))
    return CARD.format(
        run=run,
        c=model.config,
        parameters=model.num_parameters() / 1e6,
        nats=nats,
        bits=bits,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
        rate=LEARNING_RATE,
        train_files=len(run.train),
        train_bytes=byte_count(run.train.values()),
        step_tokens=TOKENS_PER_STEP,
        held_files=len(run.held_out),
        held_bytes=byte_count(run.held_out.values()),
        one_in=HELD_OUT_ONE_IN,
        held_names=", ".join(f"`{name}`" for name in run.held_out),
        eval_window=EVAL_WINDOW,
        windows=", ".join(f"{length} from {start:.0%}" for start, length in WINDOWS if length),
        clock="" if run.steps else f" (paced by the clock instead here: `--minutes {run.minutes:g}`)",
        seen=seen,
        minutes=minutes,
        passes=seen / run.tokens,
        samples=sample(model, tokenizer),
    )


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, run: TrainingRun, out: pathlib.Path) -> None:
    """Write the model folder next to ``out`` and move its files into place once all are complete."""
    half = model.to(torch.bfloat16).eval()
    bos, *eos = map(tokenizer.token_to_id, (BOS, EOS, TURN_END))
    half.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=eos[0])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[TURN, TURN_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".checkpoint-") as name:
        folder = pathlib.Path(name)
        half.save_pretrained(folder)
        wrapped.save_pretrained(folder)
        (folder / "README.md").write_text(card(half, wrapped, run), encoding="utf-8")
        size = sum(path.stat().st_size for path in folder.iterdir())
        if size >= SIZE_LIMIT:
            raise SystemExit(f"The checkpoint has {size} bytes; the limit is {SIZE_LIMIT}.")
        for path in folder.iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)
    print(f"wrote {size} bytes to {out}", flush=True)


def create_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    bos, *eos = map(tokenizer.token_to_id, (BOS, EOS, TURN_END))
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=bos,
            eos_token_id=eos,
        )
    )


def optimise(model: LlamaForCausalLM, data: Iterable[torch.Tensor], run: TrainingRun) -> None:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = (
        torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    )
    for batch in data:
        loss = token_losses(model, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = run.learning_rate
            optimizer.step()
            optimizer.zero_grad()
        run.step += 1
        if run.step % 20 == 0:
            print(f"step {run.step}, {run.elapsed_minutes:.1f} min, loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="folder of the finished checkpoint")
    parser.add_argument("--minutes", type=float, default=40, help="length of the run by the clock")
    parser.add_argument("--steps", type=int, help="length of the run in steps, instead of --minutes")
    parser.add_argument("--seed", type=int, default=311)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    train, held_out = read_corpus()
    conversations = list(chats(train.values(), rng))
    tokenizer = train_tokenizer(train.values())
    encodings = tokenizer.encode_batch([*train.values(), *conversations], add_special_tokens=False)
    documents = [encoding.ids for encoding in encodings]
    model = create_model(tokenizer)
    run = TrainingRun(
        args.seed, args.steps, args.minutes, train, held_out, len(conversations), sum(map(len, documents))
    )
    optimise(model, batches(documents, tokenizer, run, rng), run)
    save(model, tokenizer, run, args.out)


if __name__ == "__main__":
    main()
