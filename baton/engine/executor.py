"""From the Engine to ModelRunners and back: plans down, results up.

One rank is in this process. More are processes, behind the same two calls. A plan that failed, here or on any rank, is
never repaired: the next one resets every rank (`baton.engine.plan`).
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
    """Raised by a pass's `on_layer`: nobody waits for its results."""


class KvMemory(Protocol):
    """The memory behind an engine's pages, of all layers and parts; pages are listed in token order.

    The caller has checked every range and holds a pin.
    """

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of a page, in all layers and parts."""

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        """One layer's parts as contiguous `[tokens, heads, ...]`."""

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        """Store one layer's parts, converting element types where they differ."""

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        """The payloads of `count` blocks (`baton.kv.format`), one after the other from `token_start` on."""

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        """Store payloads of blocks, one after the other from `token_start` on."""


class Runner(Protocol):
    """One rank: its share of the model and of the KV. `baton.engine.model_runner` and, by hand, `baton.engine.fake`."""

    @property
    def memory(self) -> KvMemory:
        """The pages."""

    def work_counter(self) -> int: ...

    def forward(self, plan: ForwardPlan, on_layer: OnLayer | None) -> Any:
        """Take the plan's changes, then its tokens through all layers; what comes back is for `sample` alone.

        `on_layer` is called when KV of a layer is final, and after each part of log-probabilities with the last layer.
        It may raise PassEnded, if the plan has no slots. If this raises anything else, the next plan must reset.
        JoinFailed says that it has computed nothing, because of one slot.
        """

    def sample(self, plan: ForwardPlan, forwarded: Any) -> Callable[[], PlanResult]:
        """Choose the next tokens; what is returned waits for them, or raises."""


class Executor(Protocol):
    @property
    def memory(self) -> KvMemory:
        """The pages of this process's rank."""

    def work_counter(self) -> int: ...

    def launch(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> Callable[[], PlanResult]:
        """Begin the plan; what is returned waits for its result.

        Raises PassEnded if `on_layer` did. Both calls raise EngineError for all else that goes wrong.
        """


class InProcessExecutor:
    """One rank, on the engine thread."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def memory(self) -> KvMemory:
        return self.runner.memory

    def work_counter(self) -> int:
        return self.runner.work_counter()

    def launch(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> Callable[[], PlanResult]:
        with _as_engine_errors():
            wait = self.runner.sample(plan, self.runner.forward(plan, on_layer))

        def result() -> PlanResult:
            with _as_engine_errors():
                return wait()

        return result


@contextmanager
def _as_engine_errors() -> Iterator[None]:
    try:
        yield
    except (BatonError, PassEnded):
        raise
    except Exception as error:
        raise EngineError(f"the model failed: {type(error).__name__}: {error}") from error
