"""A native forward pass against torch's decoder, on models and batches of random shapes.

Every tensor has the size that the kernels may touch and no more, so that `make sanitize` sees each access outside.
"""

import ctypes
import dataclasses
import random

import pytest
import torch
from torch import Tensor

from baton.errors import EngineError
from baton.kv.format import attention_parts
from baton.model.attention import AttentionBatch, KvCache
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.native import abi
from baton.native.decoder import NativeDecoder
from baton.native.packed import PackedWeight, PackedWeights, weights_of
from baton.process.load_progress import LoadProgress
from tests.effort import fuzz

CPU = torch.device("cpu")


def random_config(rng: random.Random, inner: int | None = None, layers: int | None = None) -> ModelConfig:
    """Sizes that fill no vector, panel or tile, biases and norms in all combinations, an epsilon that counts."""
    kv_heads = rng.randint(1, 3)
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": rng.randint(2, 150),
            "hidden_size": rng.randint(1, 100),
            "intermediate_size": inner or rng.randint(1, 120),
            "num_hidden_layers": layers or rng.randint(1, 3),
            "num_key_value_heads": kv_heads,
            "num_attention_heads": kv_heads * rng.choice((1, 2, 3, 7)),
            "head_dim": 2 * rng.choice((1, 5, 8, 12, 15, 32, 40)),
            "max_position_embeddings": 4096,
            "rms_norm_eps": rng.choice((1e-6, 0.5)),
            "rope_theta": 10000.0,
        }
    )
    windows = [rng.choice((None, 1, 5, 30, 1100)) for _ in config.layers]
    return dataclasses.replace(
        config,
        layers=tuple(dataclasses.replace(each, window=w) for each, w in zip(config.layers, windows, strict=True)),
        **{name: rng.random() < 0.5 for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")},
    )


def make_decoders(
    config: ModelConfig, library: ctypes.CDLL, threads: int, dtype: torch.dtype = torch.float32
) -> tuple[Decoder, NativeDecoder]:
    """The same random weights for torch's operators in float32, and for the native kernels in `dtype`."""
    decoders = [Decoder(config, TensorOptions(kind, CPU), TensorParallel()) for kind in (torch.float32, dtype)]
    # At times so large that the exponential of SiLU's input has no float.
    gate_scale = random.Random(config.hidden_size).choice((1, 1, 100))
    tensors = [[*decoder.checkpoint_tensors(), decoder.head_tensor()] for decoder in decoders]
    for one, other in zip(*tensors, strict=True):
        weight = torch.randn(one.shape) * (1 if len(one.shape) == 1 else 2 * one.shape[1] ** -0.5)
        if "gate_proj" in one.name:
            weight *= gate_scale
        for tensor in (one, other):
            tensor.load(weight.to(dtype))
    weights = PackedWeights.private(weights_of(decoders[1], library, LoadProgress()), threads)
    return decoders[0], NativeDecoder(config, dtype, weights, library, threads)


class Pages:
    """The same pages for both, NaN where nothing was written, and tables whose rows lie apart."""

    def __init__(self, config: ModelConfig, page_size: int, contexts: list[int], unused: int = -1) -> None:
        needed = [-(-context // page_size) for context in contexts]
        parts = attention_parts("float32", config.num_kv_heads, config.head_dim)
        self.kv = [
            KvCache.allocate(
                parts, num_layers=config.num_layers, num_pages=sum(needed), page_size=page_size, device=CPU
            )
            for _ in range(2)
        ]
        for kv in self.kv:
            for part in kv.parts.values():
                part.fill_(float("nan"))
        order = torch.randperm(sum(needed)).int().split(needed)
        # Entries past the last page are never followed, and what lies between rows is not read.
        tables = torch.full((len(contexts), max(needed) + 3), unused, dtype=torch.int32)
        for row, pages in zip(tables, order, strict=True):
            row[: len(pages)] = pages
        self.tables = tables[:, : max(needed)]


def run_both(
    decoders: tuple[Decoder, NativeDecoder],
    pages: Pages,
    queries: list[int],
    contexts: list[int],
    sampled: list[int] | None,
    tolerance: float,
) -> None:
    """One forward pass of new tokens, compared: hidden states, logits and pages."""
    vocab = decoders[0].config.vocab_size
    ids = torch.randint(vocab, (sum(queries),))
    found: list[Tensor] = []
    for decoder, kv in zip(decoders, reversed(pages.kv), strict=True):
        batch = AttentionBatch.build(queries, contexts, pages.tables[: len(queries)], kv.page_size)
        hidden = decoder(ids, batch.positions, batch, kv, sampled=sampled)  # type: ignore[operator]
        found += hidden, decoder.logits(hidden) if len(hidden) else hidden
    for torchs, ours in zip(found[:2], found[2:], strict=True):
        assert (ours - torchs).norm() <= tolerance * torchs.norm()
    for name, torchs in pages.kv[1].parts.items():
        ours = pages.kv[0].parts[name]
        assert torch.equal(ours.isnan(), torchs.isnan())
        assert (ours - torchs).nan_to_num().norm() <= tolerance * torchs.nan_to_num().norm()


def some_tokens(rng: random.Random, count: int) -> list[int] | None:
    """Tokens of a pass to sample after: all, none, or any, the last ones among them."""
    chosen = rng.choice((None, 0.0, 0.1, 0.9))
    if chosen is None:
        return None
    return [token for token in range(count) if chosen and (rng.random() < chosen or token > count - 3)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
@fuzz("native forward passes", 20)
def test_a_pass_equals_torchs(library: ctypes.CDLL, dtype: torch.dtype, tolerance: float, rng: random.Random) -> None:
    torch.manual_seed(rng.getrandbits(32))
    config, count = random_config(rng), rng.randint(1, 5)
    decoders = make_decoders(config, library, rng.randint(1, 3), dtype)
    first = [rng.choice((1, 2, 17, 40, 97)) for _ in range(count)]
    if rng.random() < 0.2:
        # More rows than pass all panels together, and more keys than a part.
        first[-1] = rng.choice((530, 1090))
    then = [rng.choice((1, 1, 3, 33)) for _ in range(count)]
    contexts = [a + b for a, b in zip(first, then, strict=True)]
    pages = Pages(config, rng.choice((1, 3, 7, 16, 50)), [each + 1 for each in contexts])
    run_both(decoders, pages, first, first, some_tokens(rng, sum(first)), tolerance)
    run_both(decoders, pages, then, contexts, some_tokens(rng, sum(then)), tolerance)
    run_both(decoders, pages, [1] * count, [each + 1 for each in contexts], None, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str)
def test_a_wide_mlp_of_many_rows_equals_torchs(library: ctypes.CDLL, dtype: torch.dtype, tolerance: float) -> None:
    """Wider than the inputs that a product takes at a time where rows are many, and no multiple of them."""
    torch.manual_seed(0)
    config = random_config(random.Random(3), inner=2100)
    decoders = make_decoders(config, library, 2, dtype)
    for count in (300, 601):
        run_both(decoders, Pages(config, 16, [count]), [count], [count], None, tolerance)


@fuzz("native batches with one wrong number", 40)
def test_a_batch_with_a_wrong_number_is_refused_before_a_write(library: ctypes.CDLL, rng: random.Random) -> None:
    torch.manual_seed(rng.getrandbits(32))
    config, page_size = random_config(rng), rng.choice((1, 3, 16))
    _, decoder = make_decoders(config, library, rng.randint(1, 3))
    contexts = [rng.randint(1, 40) for _ in range(rng.randint(1, 3))]
    queries = [rng.randint(1, context) for context in contexts]
    # The number after a row of a table looks like one more page.
    pages = Pages(config, page_size, contexts, unused=0)
    kv, tables = pages.kv[0], pages.tables
    tokens = sum(queries)
    ids = torch.randint(config.vocab_size, (tokens,))
    row = rng.randrange(len(contexts))
    far = rng.choice((2**31 - 1, -(2**31)))
    spoilt, sampled = rng.choice(("page", "context", "query", "token id", "sampled")), None
    if spoilt == "page":
        tables[row, rng.randrange(-(-contexts[row] // page_size))] = rng.choice((-1, kv.num_pages, far))
    elif spoilt == "context":
        contexts[row] = rng.choice((queries[row] - 1, tables.shape[1] * page_size + 1, far))
    elif spoilt == "query":
        others = tokens - queries[row]
        queries[row] = rng.choice((0, contexts[row] + 1, -1, far))
        ids = torch.zeros(max(1, others + queries[row]) if abs(queries[row]) != abs(far) else 1, dtype=torch.int64)
    elif spoilt == "token id":
        ids[rng.randrange(tokens)] = rng.choice((-1, config.vocab_size, 2**62))
    else:
        sampled = rng.choice(([-1], [tokens], [0, 0], [0, -1]))
    batch = AttentionBatch(tuple(queries), tuple(contexts), tables, page_size)
    with pytest.raises((EngineError, RuntimeError)):
        decoder(ids, torch.zeros(0), batch, kv, sampled=sampled)
    assert all(bool(part.isnan().all()) for part in kv.parts.values())


def head(library: ctypes.CDLL, weight: Tensor, hidden: Tensor, threads: int) -> list[int]:
    """The native choice for rows of hidden states that are normalised to themselves."""
    packed = PackedWeight.pack(library, weight)
    norm = torch.ones(hidden.shape[1])
    model = abi.BatonModel(
        layers=1, hidden=hidden.shape[1], inner=1, vocab=len(weight), heads=1, kv_heads=1, head_dim=2, eps=1e-6,
        head=packed.memory.data_ptr(), norm=norm.data_ptr(),
    )  # fmt: skip
    best = torch.full((len(hidden),), -7)
    call = abi.BatonCall(threads, hidden=hidden.data_ptr(), argmax=best.data_ptr())
    workspace = library.baton_native_workspace_new()
    status = library.baton_native_head(model, len(hidden), call, workspace)
    library.baton_native_workspace_free(workspace)
    assert status == 0, library.baton_native_error()
    return best.tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_first_of_equal_logits_is_chosen(library: ctypes.CDLL, threads: int) -> None:
    """Also where they are in several panels of 32, and so perhaps of several threads; the last panel is not full."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 24)
    for _ in range(40):
        weight = 0.1 * torch.randn(300, 24)
        equal = sorted(torch.randperm(300)[:5].tolist())
        weight[equal] = hidden[1]
        # The only logits above 0 of the second row, and the largest of its negative.
        assert head(library, weight, hidden, threads)[1] == equal[0]
        assert head(library, -weight[equal], hidden, threads)[1] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_logit_that_is_not_finite_is_seen_wherever_it_is(library: ctypes.CDLL, value: float, threads: int) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(101, 8), torch.randn(2, 8).abs() + 1
    assert min(head(library, weight, hidden, threads)) >= 0
    for token in range(101):
        spoilt = weight.clone()
        spoilt[token, 3] = value
        assert head(library, spoilt, hidden, threads) == [-1, -1], token
