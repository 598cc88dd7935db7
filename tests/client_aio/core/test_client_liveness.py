"""When a connection sends a PING, when its peer is gone, and which waiting counts for neither."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from client_aio.core.liveness import (
    PING_AFTER_S,
    SILENT_AFTER_S,
    Liveness,
    Patience,
    Verdict,
    shifted,
)
from metadata.awake import LOOK_INTERVAL_S, LOOKS_PER_PERIOD

TIMEOUT_S = 2.25
REST_S = LOOKS_PER_PERIOD * LOOK_INTERVAL_S


class Watched:
    """A connection whose looks happen when they are due, or later: `stall` blocks our own loop."""

    def __init__(self) -> None:
        self.now = 100.0
        self.liveness = Liveness(TIMEOUT_S, self.now)
        self.sent_at = self.now
        self.unsent_bytes = 0
        self.pings = 0
        self.is_gone = False
        self._due_at = self.liveness.look_at(self.now, self.sent_at)

    def hear(self) -> None:
        self.liveness.alive_at = self.now

    def run(self, seconds: float) -> None:
        """Look as often as is due, for so long or until the peer is gone."""
        end = self.now + seconds
        while self._due_at <= end and not self.is_gone:
            self.now = self._due_at
            self._look()
        self.now = max(self.now, end)

    def stall(self, seconds: float) -> None:
        """Do nothing for so long; then the timer fires that was due meanwhile."""
        self.now += seconds
        if self._due_at <= self.now:
            self._look()

    def _look(self) -> None:
        excused_s = self.liveness.excused_s(self.now)
        if excused_s:
            self.sent_at = shifted(self.sent_at, excused_s, self.now)
        else:
            match self.liveness.judge(self.now, self.sent_at, self.unsent_bytes):
                case Verdict.GONE:
                    self.is_gone = True
                case Verdict.PING:
                    self.pings += 1
                    self.liveness.pinged(self.now)
                case Verdict.WAIT:
                    pass
        self._due_at = self.liveness.look_at(self.now, self.sent_at)


def test_a_peer_that_answers_nothing_gets_a_ping_and_is_gone() -> None:
    watched = Watched()
    watched.run(PING_AFTER_S - 0.01)
    assert watched.pings == 0
    watched.run(0.02)
    assert watched.pings == 1
    watched.run(TIMEOUT_S - 0.05)
    assert not watched.is_gone
    watched.run(0.1)
    assert watched.is_gone
    assert watched.pings == 1


def test_a_peer_is_silent_before_it_is_gone() -> None:
    watched = Watched()
    watched.run(PING_AFTER_S + 0.01)
    assert not watched.liveness.is_silent(watched.now)
    watched.run(SILENT_AFTER_S)
    assert watched.liveness.is_silent(watched.now)
    watched.hear()
    assert not watched.liveness.is_silent(watched.now)


def test_whatever_comes_is_a_sign_of_life() -> None:
    watched = Watched()
    for _ in range(20):
        watched.run(1.0)
        watched.hear()
    assert not watched.is_gone


def test_bytes_of_ours_that_leave_are_a_sign_of_life() -> None:
    """A large add on a slow link lies before the PING."""
    watched = Watched()
    for left in range(20, 0, -1):
        watched.unsent_bytes = left * 1_000_000
        watched.run(1.0)
    assert not watched.is_gone
    watched.run(TIMEOUT_S + 1.0)
    assert watched.is_gone


def test_a_ping_that_is_answered_is_followed_by_another() -> None:
    watched = Watched()
    for _ in range(4):
        watched.run(PING_AFTER_S + 0.01)
        watched.hear()
        watched.liveness.answered()
    assert watched.pings == 4
    assert not watched.is_gone


def test_the_first_request_after_a_pause_is_sent_with_a_ping() -> None:
    liveness = Liveness(TIMEOUT_S, 0.0)
    assert liveness.begun(PING_AFTER_S / 2) is Verdict.WAIT
    assert liveness.begun(PING_AFTER_S) is Verdict.PING


def test_time_in_which_our_own_loop_stood_still_is_no_silence() -> None:
    """Answers that came meanwhile are read before anything is judged."""
    watched = Watched()
    watched.run(PING_AFTER_S + 0.1)
    assert watched.pings == 1
    watched.stall(12.0)
    assert not watched.is_gone
    watched.hear()  # what has waited is read only now
    watched.liveness.answered()
    watched.run(PING_AFTER_S / 2)
    assert not watched.is_gone


def test_a_peer_that_is_gone_shows_though_our_own_loop_stood_still() -> None:
    watched = Watched()
    watched.stall(12.0)
    watched.run(PING_AFTER_S + TIMEOUT_S + 2 * LOOK_INTERVAL_S)
    assert watched.is_gone


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=8))
def test_a_peer_is_gone_though_our_own_loop_is_late_at_each_look(slices: list[float]) -> None:
    watched = Watched()
    begun = watched.now
    for slice_s in itertools.cycle(slices):
        watched.stall(slice_s)
        if watched.is_gone:
            break
        assert watched.now < begun + 2 * (PING_AFTER_S + TIMEOUT_S) + 4 * (max(slices) + LOOK_INTERVAL_S)


def test_a_time_moves_by_no_more_than_has_passed_since() -> None:
    assert shifted(10.0, 5.0, 20.0) == 15.0
    assert shifted(19.0, 5.0, 20.0) == 20.0


@given(st.lists(st.one_of(st.just("hear"), st.floats(0.0, 2.0), st.floats(-30.0, -0.5)), max_size=40))
def test_no_peer_is_gone_that_was_silent_for_less_than_the_timeout(steps: list[float | str]) -> None:
    """Positive numbers run the loop for so long, negative ones block it; the peer is heard in between.

    The loop runs long enough behind each standstill for the next one to be excused.
    """
    watched, awake_s = Watched(), 0.0
    for step in steps:
        if isinstance(step, str):
            watched.hear()
            watched.liveness.answered()
            awake_s = 0.0
        elif step < 0:
            watched.run(REST_S)
            watched.stall(-step)
            awake_s += REST_S
        else:
            watched.run(step)
            awake_s += step
        if watched.is_gone:
            assert awake_s >= TIMEOUT_S
            return


def test_patience_is_over_after_the_timeout_without_progress() -> None:
    patience = Patience(8.0)
    assert not any(patience.is_over(now, 5) for now in (0.0, 2.0, 4.0, 6.0, 8.0))
    assert patience.is_over(8.1, 5)
    assert not patience.is_over(8.2, 4)  # Progress.
    assert not patience.is_over(16.1, 4)
    assert patience.is_over(16.3, 4)


def test_patience_begins_again_when_nobody_has_waited() -> None:
    patience = Patience(8.0, may_rest=True)
    assert not patience.is_over(0.0, 5)
    assert not patience.is_over(8.1, 5)
    assert not patience.is_over(16.1, 5)
    assert patience.is_over(16.2, 5)


def test_patience_is_over_though_the_looks_are_rare() -> None:
    patience = Patience(8.0)
    assert not patience.is_over(0.0, 5)
    assert patience.is_over(8.1, 5)
