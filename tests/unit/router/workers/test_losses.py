"""What a lost connection with a worker counts for, and when it is no death after all."""

from __future__ import annotations

from router.workers.losses import SAME_EVENT_S, Loss, Losses

WORKER = "decode d:1"


def told(loss: Loss) -> list[bool]:
    """Whether it was a death, once that was seen."""
    seen: list[bool] = []
    loss.on_settled(lambda: seen.append(loss.death))
    return seen


def test_a_loss_is_presumed_a_death_until_the_same_incarnation_is_heard_again() -> None:
    losses = Losses()
    loss = losses.lost(WORKER, "one", 4, 10.0, shared=False)
    seen = told(loss)
    assert (loss.death, loss.share, seen) == (True, 0.25, [])
    losses.heard("decode elsewhere:1", "another")
    assert seen == []
    losses.heard(WORKER, "one")
    assert seen == [False]
    # It stays so, whatever becomes of the worker later.
    losses.heard(WORKER, "two")
    assert (loss.death, told(loss)) == (False, [False])


def test_another_incarnation_at_the_address_makes_it_a_death() -> None:
    losses = Losses()
    loss = losses.lost(WORKER, "one", 1, 10.0, shared=False)
    losses.heard(WORKER, "two")
    assert told(loss) == [True]


def test_an_incarnation_is_known_wherever_it_is_heard() -> None:
    losses = Losses()
    loss = losses.lost(WORKER, "one", 1, 10.0, shared=False)
    losses.heard("decode elsewhere:1", "one")
    assert told(loss) == [False]


def test_the_ends_of_session_and_watch_are_one_loss_in_either_order() -> None:
    losses = Losses()
    session = losses.lost(WORKER, "one", 3, 10.0, shared=False)
    # A status that was under way is read between the two.
    losses.heard(WORKER, "one")
    assert losses.lost(WORKER, "one", 0, 10.0 + SAME_EVENT_S, shared=False) is session
    assert (session.death, session.settled, session.share) == (True, False, 1 / 3)
    watch = losses.lost(WORKER, "two", 0, 20.0, shared=False)
    assert watch.share == 0
    assert losses.lost(WORKER, "two", 2, 20.1, shared=False) is watch
    assert watch.share == 0.5
    later = losses.lost(WORKER, "two", 2, 20.1 + 2 * SAME_EVENT_S, shared=False)
    assert later is not watch


def test_deaths_of_others_count_from_the_first_of_its_own() -> None:
    losses = Losses()
    losses.lost(WORKER, "before", 1, 1.0, shared=False)
    own = losses.lost(WORKER, "own", 1, 10.0, shared=False)
    other = losses.lost("prefill p:1", "other", 1, 11.0, shared=False)
    assert losses.others([own]) == 1
    losses.heard("prefill p:1", "other")
    assert (losses.others([own]), other.death) == (0, False)
