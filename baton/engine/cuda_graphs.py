"""Decode steps as CUDA graphs: one launch instead of some hundred, so that small batches do not wait for Python.

A graph is captured for a number of rows and a width of the page tables, each a power of two, when a step first needs
them; a step runs in the smallest that holds it. All graphs read the same tensors (those of `run`), which steps and
joining rows keep up to date, so nothing is copied in. Rows after the batch compute a token that is not read, on the
null page. The width bounds how far flash-attn spreads a context over the device: it divides the widest context
that the tables could hold, so with wide tables few blocks would work on a short context.

A step that makes the host wait can't be captured (flash-attn after 2.8.3 asks for the longest context in every layer);
then all steps run eagerly, and a warning says so. A step at the start shows it, on the null page. A capture first runs
the step once, so that libraries have chosen kernels and taken workspaces; this writes KV that the step itself writes
again, with the same values. Where the capture itself fails, for want of memory above all, steps of that shape run
eagerly from then on. Graphs share one memory pool: a replay may overwrite what another one left, but for its hidden
states, which are used before the next.
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
    """The number of rows, or of pages, of the smallest graph that holds `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class DecodeGraphs:
    """CUDA graphs of decode steps. They belong to the engine thread."""

    def __init__(
        self, run: Callable[[Sequence[int], int], Tensor], rows: int, width: int, page_size: int, device: torch.device
    ) -> None:
        """`run(contexts, width)` computes the hidden states of the first rows, of `rows` at most with page tables of at
        most `width` pages.

        Its attention must follow tensors alone: neither lengths nor pages may be read on the host. To be called before
        other threads use the device (`_host_waits`).
        """
        self._run = run
        self._width, self._page_size, self._device = width, page_size, device
        self._captured: dict[tuple[int, int], _Captured | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: torch hands out its 32 streams in turn, so that a new one for each would in time be that
        # of another thread's copies, which the capture would swallow; and each has a workspace of its own.
        self._side = torch.cuda.Stream(device)
        self.rows = 0 if self._host_waits() else min(MAX_ROWS, rows)

    def run(self, count: int, width: int) -> Tensor:
        """Hidden states `[count, hidden]` of the first rows, whose contexts fit in `width` pages.

        They are overwritten by the next run.
        """
        shape = padded(count), min(padded(width), self._width)
        if shape not in self._captured:
            self._captured[shape] = self._capture(*shape)
        captured = self._captured[shape]
        if captured is None:
            rows, pages = shape
            return self._run(self._contexts(rows, pages), pages)[:count]
        captured.graph.replay()
        return captured.hidden[:count]

    def _contexts(self, rows: int, width: int) -> list[int]:
        """Lengths that pass all checks; the graph does not read them."""
        return [width * self._page_size] * rows

    @torch.inference_mode()
    def _capture(self, rows: int, width: int) -> _Captured | None:
        """None if it can't be captured."""
        began = time.monotonic()
        free, _ = torch.cuda.mem_get_info(self._device)
        contexts = self._contexts(rows, width)
        self._run_aside(contexts, width)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy KV meanwhile; their calls are none of this capture's business.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local")
        try:
            # On the side stream already: a capture whose end fails does not put back the stream that was current.
            with torch.cuda.stream(self._side), capture:
                hidden = self._run(contexts, width)
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
        """Whether a step makes the host wait; then a warning says so."""
        contexts = self._contexts(1, 1)
        self._run_aside(contexts, 1)
        # This mode is the whole process's: a copy of another thread that waits would fail.
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._run_aside(contexts, 1)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            _log.warning("decode runs without CUDA graphs, because a step makes the host wait: %s", error)
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    def _run_aside(self, contexts: Sequence[int], width: int) -> None:
        """Run a step on the stream of captures."""
        main, side = torch.cuda.current_stream(self._device), self._side
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                self._run(contexts, width)
        finally:
            main.wait_stream(side)
