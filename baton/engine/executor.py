"""Executors pass the engine's plans to ModelRunners, and the results back.

InProcessExecutor has one rank, in this process. RanksExecutor (`baton.engine.ranks`) has several, with a process for
each. A failed plan is never repaired: after a failed pass, the next step resets every rank (`baton.engine.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from baton.engine.contract import OnLayer
from baton.engine.plan import ForwardPlan, PlanResult
from baton.errors import BatonError, EngineError
from baton.kv.format import PartData


class PassEnded(Exception):
    """Raised by the `on_layer` of a pass to end it, because all its chunks have ended."""


class KvMemory(Protocol):
    """The memory of an engine's pages, in all layers and parts.

    `pages` lists the pages of a handle in the order of its tokens. The caller has checked all ranges and has pinned the
    pages.
    """

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of a page, in all layers and parts."""

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        """Copy the parts of one layer, each contiguous `[tokens, heads, ...]`."""

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        """Store the parts of one layer, and convert them if the pages have another element type."""

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        """Copy the payloads (`baton.kv.format`) of `count` consecutive blocks from token `token_start` on."""

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        """Store the payloads of consecutive blocks from token `token_start` on."""


class Runner(Protocol):
    """One rank: its share of the model and of the KV. `baton.engine.model_runner` and `baton.engine.fake` have one."""

    @property
    def memory(self) -> KvMemory:
        """The memory of the rank's pages."""

    def work_counter(self) -> int:
        """Number that changes while the rank computes (`Engine.work_counter`)."""

    def forward(self, plan: ForwardPlan, on_layer: OnLayer | None) -> Any:
        """Apply the plan's changes, then take its tokens through all layers; the result is an argument of `sample`.

        `on_layer` is called with each layer whose KV is final, and with the last layer after each part of the prompts'
        log-probabilities. It may raise PassEnded if the plan has no rows of slots. Raises JoinFailed if one sequence
        can't join; then nothing was computed. After any error of a step, the next one must begin with a reset.
        """

    def sample(self, plan: ForwardPlan, forwarded: Any) -> Callable[[], PlanResult]:
        """Choose the next tokens; the returned function waits for them and returns them, or raises."""


class Executor(Protocol):
    """Runs the engine's plans on all ranks of a model, in the order in which they are launched."""

    @property
    def memory(self) -> KvMemory:
        """The memory of the pages of all ranks."""

    def work_counter(self) -> int:
        """Number that changes while the ranks compute (`Engine.work_counter`)."""

    def launch(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> Callable[[], PlanResult]:
        """Start a plan; the returned function waits for its result and returns it.

        Raises PassEnded if `on_layer` has raised it. For other failures both functions raise BatonError.
        """

    def watch_failure(self, failed: Callable[[EngineError], object]) -> None:
        """Call `failed`, from any thread, when no plan can be computed any more, because a rank has died or hangs."""

    def close(self) -> None:
        """End the processes of ranks."""


class InProcessExecutor:
    """Executor of one rank, which computes on the engine thread."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def memory(self) -> KvMemory:
        return self.runner.memory

    def work_counter(self) -> int:
        return self.runner.work_counter()

    def launch(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> Callable[[], PlanResult]:
        with as_engine_errors():
            wait = self.runner.sample(plan, self.runner.forward(plan, on_layer))

        def result() -> PlanResult:
            with as_engine_errors():
                return wait()

        return result

    def watch_failure(self, failed: Callable[[EngineError], object]) -> None:
        """There is no other process that could die."""

    def close(self) -> None:
        """There is no other process to end."""


@contextmanager
def as_engine_errors() -> Iterator[None]:
    """Raise EngineError instead of errors of other libraries."""
    try:
        yield
    except (BatonError, PassEnded):
        raise
    except Exception as error:
        raise EngineError(f"the model failed: {type(error).__name__}: {error}") from error
