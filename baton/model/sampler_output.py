"""Sampled tokens on their way from the device to the host: the copy is queued at once, `read` waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import NoToken
from baton.model.logit_tiles import LogitTiles
from baton.model.upload import download, upload
from baton.request import TokenInfo

_PROBLEMS = ("logits are not finite", "no token is allowed")


class SamplerOutput:
    """A token for each row of a batch. `tokens`: int64 `[B]`, on the device; 0 where a check failed.

    On CUDA tokens and checks travel in one copy, log-probabilities in a second where some are asked for.
    """

    def __init__(self, tokens: Tensor, checks: Sequence[Tensor]) -> None:
        """`checks`: bool `[B]` each, where False means: not finite, and no token allowed."""
        good = checks[0] if len(checks) == 1 else torch.stack(list(checks)).all(0)
        # The next step looks it up, before it is known here that the row has failed.
        self.tokens = tokens * good
        self._found = download(torch.stack([self.tokens, *checks]))
        self._rows: Sequence[int] = ()
        self._logprobs: Logprobs | None = None
        self._there = _mark(tokens.device)

    def report(self, rows: Sequence[int], logits: Tensor, tops: Sequence[int]) -> None:
        """Add log-probabilities for some rows, from their raw `logits`; `tops` as in `Logprobs.of`."""
        self._rows = rows
        chosen = self.tokens[upload(rows, torch.int64, self.tokens.device)]
        self._logprobs = Logprobs.of(logits, chosen, tops)
        self._there = _mark(self.tokens.device)

    def read(self) -> list[TokenInfo | NoToken]:
        """Wait for the device; an error in the place of each row whose checks failed."""
        if self._there is not None:
            self._there.synchronize()
        tokens, *checks = self._found.tolist()
        infos: list[TokenInfo | NoToken] = [TokenInfo(token) for token in tokens]
        if self._logprobs is not None:
            for row, info in zip(self._rows, self._logprobs.infos([tokens[row] for row in self._rows]), strict=True):
                infos[row] = info
        # The first problem of a row last, as it is the cause of the others.
        for problem, check in reversed(list(zip(_PROBLEMS, checks, strict=False))):
            for row, good in enumerate(check):
                if not good:
                    infos[row] = NoToken(problem)
        return infos


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one token a row, beside its normaliser (`[n, 2]`), and of the likeliest with their ids
    (`[m, k]` each) of the rows that ask for some; in host memory."""

    chosen: Tensor
    values: Tensor
    ids: Tensor
    tops: Sequence[int]

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> Logprobs:
        """From raw float32 `[n, vocab]` logits, of `tokens` (int64 `[n]`) and the `tops[i]` likeliest of each row.

        Rows whose entry of `tops` is 0 are the last.
        """
        norms = logits.logsumexp(-1, keepdim=True)
        chosen = torch.cat([logits.gather(1, tokens[:, None]) - norms, norms], 1)
        # A row that asks for alternatives must not make others pay for the search.
        asked = sum(top > 0 for top in tops)
        values, ids = logits[:0].topk(0)
        if asked:
            rows, count = torch.arange(asked, device=logits.device), min(max(tops), logits.shape[1])
            values, ids = LogitTiles(logits[:asked]).top(rows, count)
        return cls(download(chosen), download(values - norms[:asked]), download(ids), tops)

    def infos(self, token_ids: Sequence[int]) -> list[TokenInfo]:
        """One entry a row, with as many alternatives as it asked for; call it after the device is done."""
        alternatives = zip(self.ids.tolist(), self.values.tolist(), strict=True)
        infos = []
        for token, (logprob, _), top in zip(token_ids, self.chosen.tolist(), self.tops, strict=True):
            likeliest = tuple(zip(*next(alternatives), strict=True))[:top] if top else ()
            infos.append(TokenInfo(token, logprob, likeliest))
        return infos


@torch.inference_mode()
def token_infos(logits: Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[TokenInfo]:
    """Log-probabilities of one token a row, with its `top[i]` alternatives: from raw float32 `[n, vocab]` logits.

    Raises NoToken for logits that are not finite.
    """
    scores = Logprobs.of(logits, upload(token_ids, torch.int64, logits.device), top)
    if (there := _mark(logits.device)) is not None:
        there.synchronize()
    if not scores.chosen[:, 1].isfinite().all():
        raise NoToken(_PROBLEMS[0])
    return scores.infos(token_ids)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """An event that is reached when all work queued until now is done; None without CUDA."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    # Not the stream of the current device, which may be another one.
    event.record(torch.cuda.current_stream(device))
    return event
