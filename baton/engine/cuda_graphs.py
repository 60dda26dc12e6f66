"""Decode steps as CUDA graphs: one launch instead of hundreds, so that small batches do not wait for Python.

A graph has a number of rows and a width of the page tables, both powers of two. It is captured when a step needs it for
the first time. A step runs in the smallest graph that has room for it. All graphs read the same tensors, which steps
and joining sequences update, so nothing is copied before a step. Rows after the batch compute tokens that nobody reads,
on the null page. There are graphs of several widths, because flash-attn divides the work for the widest context that
the table can have: with a wide table, few blocks of the device would work on a short context.

A step that makes the host wait can't be captured: flash-attn after 2.8.3 asks for the longest context in every layer.
A trial step at the start, on the null page, detects this; then all steps run without graphs, and a warning says so.
Each capture first runs the step once, so that libraries have chosen kernels and allocated workspaces. This writes KV,
which the step then writes again with the same values. If a capture fails, for example because memory is short, steps of
its shape run without a graph from then on. All graphs share one memory pool, so a replay overwrites the results of
other graphs; hidden states are used before the next replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ROWS = 256
"""More rows than this run eagerly: their kernels take longer than their launches."""

_log = logging.getLogger(__name__)


def padded(count: int) -> int:
    """The smallest power of two that is at least `count`: the rows, or the width in pages, of a graph."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class DecodeGraphs:
    """CUDA graphs of decode steps; used by the engine thread only."""

    def __init__(
        self, run: Callable[[Sequence[int], int], Tensor], rows: int, width: int, page_size: int, device: torch.device
    ) -> None:
        """`run(context_lens, width)` computes the hidden states of the first `len(context_lens)` rows, with page tables
        of `width` pages. There are at most `rows` rows, and at most `width` pages.

        Its attention must read lengths and pages from device tensors only. Other threads must not use the device while
        this constructor runs (`_host_waits`).
        """
        self._run = run
        self._width, self._page_size, self._device = width, page_size, device
        self._captured: dict[tuple[int, int], _Captured | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures. torch gives out its 32 streams in turn: a new one for each capture could be the
        # stream of another thread's copies, which would become part of the graph. And each stream needs a workspace.
        self._side = torch.cuda.Stream(device)
        self.rows = 0 if self._host_waits() else min(MAX_ROWS, rows)

    def run(self, count: int, width: int) -> Tensor:
        """Compute hidden states `[count, hidden]` of the first rows, valid until the next run; `width` is in pages."""
        shape = padded(count), min(padded(width), self._width)
        if shape not in self._captured:
            self._captured[shape] = self._capture(*shape)
        captured = self._captured[shape]
        if captured is None:
            rows, pages = shape
            return self._run(self._context_lens(rows, pages), pages)[:count]
        captured.graph.replay()
        return captured.hidden[:count]

    def _context_lens(self, rows: int, width: int) -> list[int]:
        """Lengths of `rows` contexts for a capture. They only have to pass checks; the graph does not read them."""
        return [width * self._page_size] * rows

    @torch.inference_mode()
    def _capture(self, rows: int, width: int) -> _Captured | None:
        """Capture a graph; returns None, and logs a warning, if this fails."""
        began = time.monotonic()
        free, _ = torch.cuda.mem_get_info(self._device)
        context_lens = self._context_lens(rows, width)
        self._run_aside(context_lens, width)
        graph = torch.cuda.CUDAGraph()
        # With "thread_local", copies of other threads during the capture do not make it fail.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local")
        try:
            # The side stream is set here too, because a capture that fails at its end does not restore the stream.
            with torch.cuda.stream(self._side), capture:
                hidden = self._run(context_lens, width)
        except RuntimeError as error:
            _log.warning("steps of %d rows and %d pages run without a CUDA graph: %s", rows, width, error)
            return None
        taken = free - torch.cuda.mem_get_info(self._device)[0]
        _log.info(
            "captured the decode graph of %d rows and %d pages in %.2f s; graph %d, %.1f MiB more device memory",
            rows,
            width,
            time.monotonic() - began,
            1 + sum(each is not None for each in self._captured.values()),
            max(0, taken) / 2**20,
        )
        return _Captured(graph, hidden)

    @torch.inference_mode()
    def _host_waits(self) -> bool:
        """Whether a step makes the host wait for the device; logs a warning then."""
        context_lens = self._context_lens(1, 1)
        self._run_aside(context_lens, 1)
        # This mode holds for the whole process: a copy of another thread that waits would fail.
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._run_aside(context_lens, 1)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            _log.warning("decode runs without CUDA graphs, because a step makes the host wait: %s", error)
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    def _run_aside(self, context_lens: Sequence[int], width: int) -> None:
        """Run a step on the side stream, after the work of the engine's stream and before its next work."""
        main, side = torch.cuda.current_stream(self._device), self._side
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                self._run(context_lens, width)
        finally:
            main.wait_stream(side)
