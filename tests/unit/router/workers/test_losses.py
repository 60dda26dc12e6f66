"""Lost connections with a worker: when they count as its death, and when not."""

import pytest

from router.workers.failures import SAME_LOSS_S, WorkerLoss, WorkerLosses

WORKER = "decode d:1"


def told(loss: WorkerLoss) -> list[bool]:
    """Whether it was a death, once that was seen."""
    seen: list[bool] = []
    loss.on_settled(lambda: seen.append(loss.death))
    return seen


def test_a_loss_is_presumed_a_death_until_the_same_incarnation_is_heard_again() -> None:
    losses = WorkerLosses()
    loss = losses.record_loss(WORKER, "one", 4, 10.0, has_foreign_suspects=False)
    seen = told(loss)
    assert (loss.death, loss.suspect_share, seen) == (True, 0.25, [])
    losses.record_status("decode elsewhere:1", "another")
    assert seen == []
    losses.record_status(WORKER, "one")
    assert seen == [False]
    # It stays so, whatever becomes of the worker later.
    losses.record_status(WORKER, "two")
    assert (loss.death, told(loss)) == (False, [False])


@pytest.mark.parametrize(("heard", "death"), [((WORKER, "two"), True), (("decode elsewhere:1", "one"), False)])
def test_another_incarnation_at_the_address_makes_it_a_death_and_the_same_one_anywhere_none(
    heard: tuple[str, str], death: bool
) -> None:
    losses = WorkerLosses()
    loss = losses.record_loss(WORKER, "one", 1, 10.0, has_foreign_suspects=False)
    losses.record_status(*heard)
    assert told(loss) == [death]


def test_the_ends_of_session_and_watch_are_one_loss_in_either_order() -> None:
    losses = WorkerLosses()
    session = losses.record_loss(WORKER, "one", 3, 10.0, has_foreign_suspects=False)
    # A status that was under way is read between the two.
    losses.record_status(WORKER, "one")
    assert losses.record_loss(WORKER, "one", 0, 10.0 + SAME_LOSS_S, has_foreign_suspects=False) is session
    assert (session.death, session.settled, session.suspect_share) == (True, False, 1 / 3)
    watch = losses.record_loss(WORKER, "two", 0, 20.0, has_foreign_suspects=False)
    assert watch.suspect_share == 0
    assert losses.record_loss(WORKER, "two", 2, 20.1, has_foreign_suspects=False) is watch
    assert watch.suspect_share == 0.5
    later = losses.record_loss(WORKER, "two", 2, 20.1 + 2 * SAME_LOSS_S, has_foreign_suspects=False)
    assert later is not watch


def test_deaths_of_others_count_from_the_first_of_its_own() -> None:
    losses = WorkerLosses()
    losses.record_loss(WORKER, "before", 1, 1.0, has_foreign_suspects=False)
    own = losses.record_loss(WORKER, "own", 1, 10.0, has_foreign_suspects=False)
    other = losses.record_loss("prefill p:1", "other", 1, 11.0, has_foreign_suspects=False)
    assert losses.count_others([own]) == 1
    losses.record_status("prefill p:1", "other")
    assert (losses.count_others([own]), other.death) == (0, False)
