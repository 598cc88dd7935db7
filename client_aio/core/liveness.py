"""Liveness: when a connection sends a PING, when its peer counts as gone, and which waiting was our own.

The theory. A bookie that lives answers a PING at once, even while its disk hangs or it does not read adds for
want of room. So a peer of which nothing comes for a while after a PING is gone, or cannot be reached. Three
things are no silence of the peer:

- our bytes still leave: a large add on a slow link lies before the PING;
- nothing is outstanding: the peer has nothing to say;
- our own event loop did not run: the answers wait in the system's buffers, and nobody has read them.

The third is seen at a timer that fires late. `metadata.awake` has the two rules for it. The longest
standstill of some looks in a row counts for no deadline. What is over is judged after the answers that wait
are read.

`Patience` is the deadline of work that many bookies do together. It is given the time of an `AwakeClock`,
which keeps the same rules.

Owns the decisions. Does not own the clock, the timer nor the connection. All times are of the caller's clock.
"""

from __future__ import annotations

import enum

from metadata.awake import LATE_S, LOOK_INTERVAL_S, Standstills

PING_AFTER_S = 0.5
"""A connection with outstanding requests sends a PING when nothing has come for this time."""
SILENT_AFTER_S = 0.5
"""A peer that has not answered a PING for this time is asked after the other bookies."""
PING_TIMEOUT_S = 2.25
"""A peer of which nothing comes for this time after a PING is gone, by default.

Above two seconds: a bookie whose event loop stands still for that long has not failed."""


class Verdict(enum.Enum):
    """The outcome of a look at a connection."""

    WAIT = "wait"
    PING = "ping"
    GONE = "gone"


def shifted(at: float, excused_s: float, now: float) -> float:
    """Return a time moved forward by the time since then for which our own loop did not run."""
    return at + min(excused_s, now - at)


class Patience:
    """The deadline of something that should make progress, and is looked at again and again.

    Args:
        may_rest: looks are made only while somebody waits. Without a look for the whole timeout nobody has
            waited, and the time begins again.
    """

    __slots__ = ("_asked_at", "_may_rest", "_progress", "_since", "_timeout_s")

    def __init__(self, timeout_s: float, *, may_rest: bool = False) -> None:
        self._timeout_s = timeout_s
        self._may_rest = may_rest
        self._since = self._asked_at = float("-inf")
        self._progress: object = self  # A first look finds progress.

    def is_over(self, now: float, progress: object) -> bool:
        """Return whether there has been no progress for the whole timeout.

        Args:
            now: by a clock that stands still while our own event loop does.
            progress: another value than at the last look is progress.
        """
        has_rested = self._may_rest and now > self._asked_at + self._timeout_s
        if progress != self._progress or has_rested:
            self._since, self._progress = now, progress
        self._asked_at = now
        return now > self._since + self._timeout_s


class Liveness:
    """The judgement of one connection.

    Args:
        timeout_s: a peer of which nothing comes for this time after a PING is gone.
        now: the time at which the connection was made.

    Attributes:
        alive_at: when the peer last gave a sign of life. The caller sets it when bytes come.
        was_late: whether our own loop stood still before the last look.
    """

    __slots__ = (
        "_due_at", "_looked_at", "_pinged_at", "_standstills", "_timeout_s", "_unsent_bytes", "alive_at",
        "was_late",
    )  # fmt: skip

    def __init__(self, timeout_s: float, now: float) -> None:
        self.alive_at = now
        self._timeout_s = timeout_s
        self._pinged_at: float | None = None
        self._unsent_bytes = 0
        self._standstills = Standstills()
        self._looked_at = now
        self._due_at: float | None = None
        self.was_late = False

    def begun(self, now: float) -> Verdict:
        """Judge at the first request of an idle connection, which may have been forgotten on the way."""
        is_old = self._pinged_at is None and now - self.alive_at >= PING_AFTER_S
        return Verdict.PING if is_old else Verdict.WAIT

    def pinged(self, now: float) -> None:
        """Note that a PING was sent."""
        self._pinged_at = now

    def answered(self) -> None:
        """Note that the PING was answered."""
        self._pinged_at = None

    def is_silent(self, now: float) -> bool:
        """Return whether the peer has given no sign of life for a while after a PING."""
        return self._pinged_at is not None and self._silence(self._pinged_at, now) >= SILENT_AFTER_S

    def look_at(self, now: float, waiting_since: float) -> float:
        """Return when to look next, and note it: from then on a timer is late.

        Args:
            waiting_since: when the oldest outstanding request was sent.
        """
        if self._pinged_at is None:
            due = max(self.alive_at, waiting_since) + PING_AFTER_S
        else:
            due = max(self.alive_at, self._pinged_at) + self._timeout_s
        self._looked_at = now
        self._due_at = min(now + LOOK_INTERVAL_S, max(due, now + 0.01))
        return self._due_at

    def excused_s(self, now: float) -> float:
        """Note a look; return the time to excuse, in which our own loop stood still. Then look again."""
        self.was_late = self._due_at is not None and now - self._due_at >= LATE_S
        self._due_at = None
        excused_s = self._standstills.look(now - self._looked_at if self.was_late else 0.0)
        if excused_s:
            self.alive_at = shifted(self.alive_at, excused_s, now)
            if self._pinged_at is not None:
                self._pinged_at = shifted(self._pinged_at, excused_s, now)
        return excused_s

    def judge(self, now: float, waiting_since: float, unsent_bytes: int) -> Verdict:
        """Judge the peer of a connection with outstanding requests. Read what has come before it is ended.

        Args:
            waiting_since: when the oldest outstanding request was sent.
            unsent_bytes: of ours, not yet taken by the peer's system.
        """
        if unsent_bytes < self._unsent_bytes:
            self.alive_at = now
        self._unsent_bytes = unsent_bytes
        if self._pinged_at is None:
            is_due = self._silence(waiting_since, now) >= PING_AFTER_S
            return Verdict.PING if is_due else Verdict.WAIT
        is_gone = self._silence(self._pinged_at, now) >= self._timeout_s
        return Verdict.GONE if is_gone else Verdict.WAIT

    def _silence(self, since: float, now: float) -> float:
        return now - max(self.alive_at, since)
