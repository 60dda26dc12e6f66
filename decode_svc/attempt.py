"""One attempt at a decode worker: its state, its choices, and the handles that it holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.contract import KvHandle
from baton.lifecycle import Lifecycle, State
from baton.request import FirstToken, Handoff
from decode_svc.block_hasher import RollingBlockHasher
from decode_svc.messages import AttemptKey, Reserve


@dataclass(slots=True)
class Choice:
    """A choice that still decodes: its sequence, where that is, and since when; `hasher` names what it may publish."""

    sequence: int
    handle: KvHandle
    hasher: RollingBlockHasher | None
    since: float
    state: State = State.SLOT_WAIT


@dataclass(eq=False, slots=True)
class Pending:
    """The choices that are still to be forked: their first tokens by index, and what each of them begins with."""

    context: KvHandle
    firsts: dict[int, FirstToken]
    handoff: Handoff
    hasher: RollingBlockHasher | None
    fetch_ms: float
    since: float


@dataclass(eq=False, slots=True)
class Attempt:
    """One attempt, owned by a session; its pages hold `tokens` tokens of one choice.

    `age` orders attempts from the oldest: a request that was tried before is older than its reservation, so that what
    was given back once is not the first to be given back again. `choices` are those that decode, by index; `pending`
    are those that wait to be forked.
    """

    session: int
    age: tuple[int, int]
    request: Reserve
    tokens: int
    handle: KvHandle
    spare: KvHandle | None
    life: Lifecycle
    reserved_at: float
    cancelled: set[int] = field(default_factory=set)
    choices: dict[int, Choice] = field(default_factory=dict)
    pending: Pending | None = None
    stepped: bool = False
    """Whether it has had a token."""

    @property
    def key(self) -> AttemptKey:
        """Its name within the session."""
        return self.request.key

    @property
    def committed(self) -> bool:
        """Whether its KV is there, so that its handles belong to sequences."""
        return self.life.state in (State.SLOT_WAIT, State.DECODING, State.PAUSED)

    @property
    def sequences(self) -> int:
        """Sequences that it has, and the one that it begins with."""
        return len(self.choices) if self.committed else 1

    @property
    def forks(self) -> int:
        """Choices that are still to be forked."""
        return len(self.pending.firsts) if self.pending is not None else 0

    @property
    def moves(self) -> bool:
        """Whether it goes on without anybody else's doing: to its commit, or with a choice that is not paused."""
        return not self.committed or any(choice.state is not State.PAUSED for choice in self.choices.values())

    @property
    def handles(self) -> list[KvHandle]:
        """All that it holds."""
        if not self.committed:
            return [self.handle] if self.spare is None else [self.handle, self.spare]
        own = [choice.handle for choice in self.choices.values()]
        return own if self.pending is None else [*own, self.pending.context]
