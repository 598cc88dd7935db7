"""Which ledgers count as abandoned, and after which time."""

from __future__ import annotations

from client_aio.core.abandonment import Sight, Standing, may_be_left
from metadata.model.ledger import Fragment, LedgerState

FRAGMENT = Fragment(0, 0, ("b1", "b2"))
OPEN = Sight(LedgerState.OPEN, 0, FRAGMENT, 7)


def test_a_fragment_may_be_left_if_it_names_a_lost_bookie_that_another_one_could_replace() -> None:
    assert may_be_left(("b1", "b2"), {"b1"}, ["b2", "b3"])
    assert not may_be_left(("b1", "b2"), {"b1"}, ["b2"])
    assert not may_be_left(("b1", "b2"), {"b4"}, ["b2", "b3"])


def test_what_stands_still_for_the_grace_period_is_abandoned() -> None:
    standing = Standing(10.0)
    assert standing.due([1, 2], 0.0, 9) == [1, 2]
    assert not standing.note(1, OPEN, 0.0)
    assert standing.due([1], 9.0, 9) == []
    assert not standing.note(1, OPEN, 9.0), "it was looked at too early"
    assert standing.due([1], 10.0, 9) == [1]
    assert standing.note(1, OPEN, 10.0)
    assert standing.due([1], 19.0, 9) == [], "it counts anew"
    assert standing.note(1, OPEN, 20.0)


def test_whatever_moves_begins_the_grace_period_anew() -> None:
    standing = Standing(10.0)
    for now, sight in (
        (0.0, OPEN),
        (10.0, OPEN._replace(last_listed=8)),
        (20.0, OPEN._replace(last_listed=8, last_fragment=Fragment(8, 0, ("b1", "b3")))),
        (30.0, OPEN._replace(state=LedgerState.IN_RECOVERY)),
        (40.0, None),
        (50.0, None),
        (60.0, OPEN),
    ):
        assert not standing.note(1, sight, now)
    assert standing.note(1, OPEN, 70.0)


def test_a_ledger_that_is_no_candidate_any_more_begins_anew() -> None:
    standing = Standing(10.0)
    standing.note(1, OPEN, 0.0)
    standing.due([], 5.0, 9)
    assert len(standing) == 0
    assert standing.due([1], 10.0, 9) == [1]
    assert not standing.note(1, OPEN, 10.0)


def test_those_that_waited_longest_are_looked_at_first_and_none_starves() -> None:
    standing, seen = Standing(8.0), list[int]()
    for now in range(5):
        due = standing.due(range(10), float(now), 2)
        for ledger_id in due:
            standing.note(ledger_id, None, float(now))
        seen += due
    assert sorted(seen) == list(range(10))
    assert standing.due(range(10), 5.0, 2) == [0, 1]
