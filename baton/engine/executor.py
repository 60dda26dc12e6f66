"""From the Engine to ModelRunners and back: plans down, results up.

One rank is in this process. More are processes, behind the same two calls. A plan that failed, here or on any rank, is
never repaired: the next one resets every rank (`baton.engine.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from baton.engine.kv_memory import KvMemory
from baton.engine.plan import ForwardPlan, PlanResult
from baton.errors import BatonError, EngineError

OnLayer = Callable[[int], None]
"""Called with a layer's index once a chunk's KV of it is final and readable; what it raises ends the chunk."""


class Runner(Protocol):
    """One rank: its share of the model and of the KV. `baton.engine.model_runner` and, by hand, `baton.engine.fake`."""

    @property
    def memory(self) -> KvMemory:
        """The pages."""

    def forward(self, plan: ForwardPlan, on_layer: OnLayer | None) -> Any:
        """Take the plan's changes, then its tokens through all layers; what comes back is for `sample` alone.

        If it raises, the next plan must reset.
        """

    def sample(self, plan: ForwardPlan, forwarded: Any) -> Callable[[], PlanResult]:
        """Choose the next tokens; what is returned waits for them, or raises."""


class Executor(Protocol):
    """See the module's text."""

    @property
    def memory(self) -> KvMemory:
        """The pages of this process's rank."""

    def launch(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> Callable[[], PlanResult]:
        """Begin the plan; what is returned waits for its result.

        Either raises what `on_layer` raised, and EngineError for all else that goes wrong.
        """


class InProcessExecutor:
    """One rank, on the engine thread."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def memory(self) -> KvMemory:
        """See Executor."""
        return self.runner.memory

    def launch(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> Callable[[], PlanResult]:
        """See Executor."""
        from_caller: list[BaseException] = []

        def call(layer: int) -> None:
            try:
                if on_layer is not None:
                    on_layer(layer)
            except BaseException as error:
                from_caller.append(error)
                raise

        with _as_engine_errors(from_caller):
            wait = self.runner.sample(plan, self.runner.forward(plan, call))

        def result() -> PlanResult:
            with _as_engine_errors():
                return wait()

        return result


@contextmanager
def _as_engine_errors(from_caller: Sequence[BaseException] = ()) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, BatonError) or error in from_caller:
            raise
        raise EngineError(f"the model failed: {type(error).__name__}: {error}") from error
