"""The decoder of one stage of a pipeline, with the interface of a whole decoder.

    stage 0:  embedding, layers ── hidden states ──▶ stage 1: layers ── … ──▶ last stage: layers, norm, head

A pass goes through the stages in pieces of its tokens, so that a stage computes one piece while the next stage computes
the piece before. m pieces take m + p - 1 turns through p stages instead of m p (Huang et al. 2019, arXiv:1811.06965,
without the backward pass). The pieces of a sequence follow each other, so the KV of earlier tokens is always there.
Pieces are not small: each reads all weights of the stage, and kernels need rows. A decode step is one piece, because it
takes about as long as its reads of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from baton.errors import EngineError
from baton.model.attention import AttentionBatch, KvCache
from baton.model.decoder import Decoder
from baton.native.collective import Channel
from baton.native.decoder import NativeDecoder, NativeOutput

_PIECES, _MIN_TOKENS = 8, 128
"""Largest number of pieces of a pass, and smallest number of tokens of all pieces but the last."""


class StageDecoder:
    """The decoder of a stage; `receive` and `send` are its channels from the stage before and to the next one."""

    def __init__(self, decoder: Decoder | NativeDecoder, receive: Channel | None, send: Channel | None) -> None:
        self.config = decoder.config
        self._decoder = decoder
        self._receive = receive
        self._send = send
        # Hidden states of native kernels are float32, whatever the dtype of the weights.
        self._dtype = torch.float32 if isinstance(decoder, NativeDecoder) else decoder.options.dtype

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KvCache,
        on_layer: Callable[[int], None] | None = None,
        sampled: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute as `Decoder.forward` does. Before the last stage the result is empty, `[0, hidden]`.

        Raises EngineError after an abort of a channel, with pages in host memory, and with `on_layer`, since the layers
        of other stages end at other times.
        """
        if on_layer is not None or batch.host is not None:
            raise EngineError("a pass through a pipeline reports no layers, and reads KV of its device only")
        wanted = range(batch.num_tokens) if sampled is None else sampled
        found = [torch.empty((0, self.config.hidden_size), dtype=self._dtype)]
        for piece in [range(batch.num_tokens)] if batch.is_step else pieces_of(batch.num_tokens):
            own = batch if len(piece) == batch.num_tokens else batch.select(piece)
            reads = [token - piece.start for token in wanted if token in piece] if self._send is None else None
            hidden = self._compute(token_ids[piece.start : piece.stop], own, kv, reads)
            if self._send is not None:
                self._send.send(hidden)
            else:
                found.append(hidden)
        return torch.cat(found)

    __call__ = forward

    def _compute(self, token_ids: Tensor, batch: AttentionBatch, kv: KvCache, sampled: Sequence[int] | None) -> Tensor:
        if self._receive is None:
            return self._decoder.forward(token_ids, batch.positions, batch, kv, None, sampled)
        hidden = self._receive.receive((batch.num_tokens, self.config.hidden_size), self._dtype)
        if isinstance(self._decoder, NativeDecoder):
            return self._decoder.forward(None, batch.positions, batch, kv, None, sampled, hidden)
        return self._decoder.run_layers(hidden, batch.positions, batch, kv, None, sampled)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute as `Decoder.logits` does, on the last stage."""
        return self._decoder.logits(hidden)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of this rank."""
        return self._decoder.weight_bytes


class NativeStageDecoder(StageDecoder):
    """The decoder of a stage on native kernels, with the interface of NativeDecoder."""

    def __init__(self, decoder: NativeDecoder, receive: Channel | None, send: Channel | None) -> None:
        super().__init__(decoder, receive, send)
        self._native = decoder
        self.work_counter = decoder.work_counter
        self.lowest_noise = decoder.lowest_noise

    def forward_head(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv: KvCache,
        on_layer: Callable[[int], None] | None,
        sampled: Sequence[int] | None,
        logits: bool,
    ) -> NativeOutput:
        """Compute as `NativeDecoder.forward_head` does; without rows unless this is the last stage."""
        hidden = self.forward(token_ids, batch.positions, batch, kv, on_layer, sampled)
        return self._native.head(hidden, logits and self._send is None)


def pieces_of(tokens: int) -> Iterator[range]:
    """The tokens of each piece of a pass of `tokens` tokens that is not a decode step."""
    size = max(_MIN_TOKENS, -(-tokens // _PIECES))
    for first in range(0, tokens, size):
        yield range(first, min(first + size, tokens))
