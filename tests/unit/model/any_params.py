"""Sampling parameters of all kinds, alone and together, for property tests."""

import hypothesis.strategies as st

from baton.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, SamplingParams


def any_params(vocab: int) -> st.SearchStrategy[SamplingParams]:
    """Parameters that differ in what they ask of the sampler."""
    token = st.integers(0, vocab - 1)

    def some(most: int) -> st.SearchStrategy[tuple[int, ...]]:
        size = st.sampled_from([1, 7, most]).map(lambda count: min(count, vocab))
        start = st.integers(0, vocab - 1)
        return st.builds(lambda count, first: tuple((first + i) % vocab for i in range(count)), size, start)

    return st.fixed_dictionaries(
        {"seed": st.integers(0, 2**64 - 1)},
        optional={
            "temperature": st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0, 100.0]),
            "top_k": st.sampled_from([1, 50, 64, 65, 200, vocab // 2, vocab - 1, vocab, 2**31 - 1]),
            "top_p": st.sampled_from([1e-6, 0.001, 0.05, 0.4, 0.7, 0.95, 0.9999999]),
            "min_p": st.sampled_from([1e-6, 0.02, 0.5, 1.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.3]),
            "presence_penalty": st.sampled_from([-1.0, 0.5]),
            "frequency_penalty": st.sampled_from([-0.5, 1.0]),
            "logit_bias": some(MAX_LOGIT_BIAS).map(lambda ids: tuple((i, (-100.0, 2.0, 9.0)[i % 3]) for i in ids)),
            "allowed_token_ids": st.one_of(st.tuples(token), some(vocab // 2), some(vocab - 1)),
            "min_tokens": st.sampled_from([0, 5]),
            "stop_token_ids": some(MAX_STOP_TOKEN_IDS).map(lambda ids: ids[: vocab // 4]),
            "logprobs": st.sampled_from([0, 1, MAX_LOGPROBS]),
        },
    ).map(lambda chosen: SamplingParams(**chosen))  # type: ignore[arg-type]
