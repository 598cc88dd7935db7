"""One bookie as it is known: its figures, its curves, its state; and the ring of events. Pure.

The figures come from an answer to INFO, or from the bookie's own `/metrics`. Both are a peer's text: a number
that is none raises one of `MALFORMED`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from client_aio.core.audit import Condition
from metadata.ids import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from metadata.access.bookies import BookieRecord, Order

SERIES_POINTS = 60
EVENTS_KEPT = 300
_TOGETHER_S = 10.0
_TIGHT_SHARE = 0.05


class Series:
    """The last values of one curve, oldest first. None: there was nothing to measure."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: deque[float | None] = deque(maxlen=SERIES_POINTS)

    def add(self, value: float | None) -> None:
        """Append a value; beyond `SERIES_POINTS` the oldest one goes."""
        self.values.append(value)

    @property
    def last(self) -> float | None:
        """Return the newest value; None for none."""
        return self.values[-1] if self.values else None


class Figures(NamedTuple):
    """The part of an answer to INFO that this model keeps."""

    uptime_s: float
    is_writable: bool
    disk_free: int
    disk_total: int
    is_tight: bool
    ledgers: int
    ledgers_damaged: int
    connections: int
    polls_waiting: int
    ledgers_watched: int
    entries_added: int
    bytes_added: int
    bytes_read: int
    groups: int
    commit_mean_s: float

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Figures:
        """Parse an answer to INFO; raises one of `MALFORMED`."""
        storage, counters = document["storage"], document["counters"]
        disk, ledgers = storage["disk"], storage["ledgers"]
        return cls(
            uptime_s=_number(document["uptime_s"]),
            is_writable=bool(document["is_writable"]),
            disk_free=int(_number(disk["free_bytes"])),
            disk_total=int(_number(disk["total_bytes"])),
            is_tight=bool(disk["is_tight"] or disk["is_full"]),
            ledgers=int(_number(ledgers["count"])),
            ledgers_damaged=int(_number(ledgers["damaged"])) or int(bool(ledgers["all_damaged"])),
            connections=int(_number(document["connections"])),
            polls_waiting=int(_number(document["polls_waiting"])),
            ledgers_watched=int(_number(document["ledgers_watched"])),
            entries_added=int(_number(counters["entries_added"])),
            bytes_added=int(_number(counters["bytes_added"])),
            bytes_read=int(_number(counters["bytes_read"])),
            groups=int(_number(storage["groups"]["count"])),
            commit_mean_s=_number(storage["fsync_us"]["mean"]) / 1e6,
        )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a number from 0 on")
    return value


_BUCKET = 'bookie_aio_add_seconds_bucket{le="'


class Scrape(NamedTuple):
    """The part of a bookie's own `/metrics` that INFO lacks: the times of adds, in buckets."""

    nonce: str
    """Drawn at the bookie's start. It tells another process at the same address from the bookie."""
    bounds: tuple[float, ...]
    """Ascending, the last one infinite, and at least one before it; empty for no metrics of adds."""
    reached: tuple[float, ...]
    """How many adds took at most as long as each bound."""

    @classmethod
    def of(cls, text: str) -> Scrape:
        """Parse the text format of Prometheus; raises one of `MALFORMED`."""
        nonce, bounds, reached = "", [], []
        for line in text.splitlines():
            if line.startswith(_BUCKET):
                bound, _, value = line[len(_BUCKET) :].partition('"} ')
                bounds.append(float(bound))
                reached.append(_number(float(value)))
            elif line.startswith("bookie_aio_bookie_info{"):
                nonce = line.partition('nonce="')[2].partition('"')[0]
        ascend = all(low < high for low, high in pairwise(bounds))
        if bounds and not (ascend and len(bounds) > 1 and bounds[0] >= 0 and bounds[-1] == math.inf):
            raise ValueError("the buckets of adds are not those of a histogram of times")
        return cls(nonce, tuple(bounds), tuple(reached))

    def p99_since(self, before: Scrape) -> float | None:
        """Return the 99th percentile of the adds since an earlier scrape; None for no add."""
        if before.bounds != self.bounds or before.nonce != self.nonce or not self.bounds:
            return None
        counts = [now - then for now, then in zip(self.reached, before.reached, strict=True)]
        if counts[-1] <= 0:
            return None
        highest = self.bounds[-2]
        reached = (
            bound for bound, count in zip(self.bounds, counts, strict=True) if count >= 0.99 * counts[-1]
        )
        return min(next(reached), highest)


class Event(NamedTuple):
    """One thing that happened, or several alike."""

    number: int
    """Counts from 0, so that a page can tell new events."""
    at: float
    """The wall clock, in seconds since the epoch."""
    kind: str
    """What it is about, such as "bookie lost"; one of `EVENT_KINDS`."""
    subject: str
    """The bookie, or how an ensemble changed: events of one kind and subject are counted together."""
    text: str
    times: int
    """How many ledgers it concerns; 1 where it concerns none."""
    ledger_id: int | None
    """One of the ledgers concerned."""


EVENT_KINDS = {
    "bookie lost": Condition.DEGRADED,
    "bookie silent": Condition.DEGRADED,
    "bookie back": Condition.HEALTHY,
    "bookie changed": Condition.HEALTHY,
    "ensemble changed": Condition.HEALTHY,
    "taken over": Condition.HEALTHY,
    "recovered": Condition.HEALTHY,
    "repair began": Condition.DEGRADED,
    "repaired": Condition.HEALTHY,
    "repair over": Condition.HEALTHY,
    "auto recovery": Condition.HEALTHY,
    "metadata": Condition.DEGRADED,
}
"""The kinds of events, and how serious each one is."""


class EventRing:
    """The last events, oldest first."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._next = 0

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def add(self, at: float, kind: str, subject: str, text: str, ledger_id: int | None = None) -> None:
        """Note an event. Of `text`, "{ledgers}" becomes "ledger 7" or "12 ledgers"."""
        assert kind in EVENT_KINDS
        for index in range(len(self._events) - 1, -1, -1):
            one = self._events[index]
            if one.at < at - _TOGETHER_S:
                break
            if (one.kind, one.subject, one.text) == (kind, subject, text):
                if ledger_id is not None:
                    self._events[index] = one._replace(times=one.times + 1, number=self._next)
                    self._next += 1
                    return
                break
        self._events.append(Event(self._next, at, kind, subject, text, 1, ledger_id))
        self._next += 1

    def newest(self, count: int, kind: str = "") -> list[Event]:
        """Return the newest events, the newest first; only those of one kind if one is given."""
        found = (one for one in reversed(self._events) if kind in ("", one.kind))
        return list(islice(found, count))


def ledgers_text(count: int) -> str:
    """Return a number of ledgers in words."""
    return "1 ledger" if count == 1 else f"{count:,} ledgers"


def text_of_event(event: Event) -> str:
    """Return an event as a sentence."""
    ledgers = f"ledger {event.ledger_id}" if event.times == 1 else ledgers_text(event.times)
    return event.text.replace("{ledgers}", ledgers)


@dataclass(slots=True)
class BookieState:
    """One bookie, as it is known now."""

    bookie_id: str
    record: BookieRecord | None = None
    """Its registration; None while it is not registered. `last_record` stays."""
    last_record: BookieRecord | None = None
    order: Order | None = None
    figures: Figures | None = None
    """As it answered last."""
    figures_at: float = 0.0
    """When it did, by the observer's monotonic time."""
    scrape: Scrape | None = None
    """Its own metrics, as read last; None where it announces no endpoint, or none of its own."""
    is_silent: bool = False
    """It is registered, and gave no answer to the last INFO."""
    away_since: float | None = None
    """Since when it is down or silent, by the observer's monotonic time."""
    has_p99: bool = False
    """The latencies are the 99th percentiles of adds; otherwise the means of group commits."""
    entries_per_s: Series = field(default_factory=Series)
    bytes_per_s: Series = field(default_factory=Series)
    read_bytes_per_s: Series = field(default_factory=Series)
    latency_s: Series = field(default_factory=Series)
    _before: tuple[float, Figures, Scrape | None] | None = None

    @property
    def state(self) -> str:
        """Return "writable", "read-only", "silent" or "down", as `cluster status` does."""
        if self.record is None:
            return "down"
        if self.is_silent:
            return "silent"
        writable = self.record.is_writable and (self.figures is None or self.figures.is_writable)
        return "writable" if writable and self.order is None else "read-only"

    @property
    def condition(self) -> Condition:
        """Return how bad this is for the cluster."""
        if self.state in ("down", "silent") or (self.state == "read-only" and self.order is None):
            return Condition.DEGRADED
        damaged = self.figures is not None and self.figures.ledgers_damaged > 0
        return Condition.DEGRADED if damaged or self.is_tight else Condition.HEALTHY

    @property
    def is_tight(self) -> bool:
        """Return whether its disks are nearly full."""
        if self.figures is None:
            return self.record is not None and self.record.is_tight
        return self.figures.is_tight or self.figures.disk_free < _TIGHT_SHARE * self.figures.disk_total

    def sample(self) -> None:
        """Append a point to each curve: what has happened since the sample before."""
        is_known = self.record is not None and not self.is_silent
        figures, at = (self.figures, self.figures_at) if is_known else (None, 0.0)
        before, self._before = self._before, None if figures is None else (at, figures, self.scrape)
        if figures is None or before is None or at <= before[0] or figures.uptime_s < before[1].uptime_s:
            for series in (self.entries_per_s, self.bytes_per_s, self.read_bytes_per_s, self.latency_s):
                series.add(None)
            return
        elapsed, earlier = at - before[0], before[1]
        self.entries_per_s.add((figures.entries_added - earlier.entries_added) / elapsed)
        self.bytes_per_s.add((figures.bytes_added - earlier.bytes_added) / elapsed)
        self.read_bytes_per_s.add((figures.bytes_read - earlier.bytes_read) / elapsed)
        self.has_p99 = self.scrape is not None and before[2] is not None
        if self.scrape is not None and before[2] is not None:
            self.latency_s.add(self.scrape.p99_since(before[2]))
        else:
            self.latency_s.add(_mean_commit_between(earlier, figures))


def _mean_commit_between(before: Figures, after: Figures) -> float | None:
    """Return the mean time of the group commits between two answers to INFO; None where it is not known.

    INFO has the mean since the start, rounded to 1 µs. Once there were many groups, the rounding is larger
    than what is looked for: then nothing is returned.
    """
    groups = after.groups - before.groups
    if groups <= 0 or 1e-6 * after.groups > 0.1 * groups * max(after.commit_mean_s, 1e-5):
        return None
    return max((after.commit_mean_s * after.groups - before.commit_mean_s * before.groups) / groups, 0.0)


def total_of(bookies: Collection[BookieState], series: str) -> list[float | None]:
    """Return the sum over bookies of one of their curves, oldest first."""
    curves = [list(getattr(one, series).values) for one in bookies]
    length = max(map(len, curves), default=0)
    found: list[float | None] = []
    for back in range(length, 0, -1):
        values = [curve[-back] for curve in curves if len(curve) >= back]
        known = [value for value in values if value is not None]
        found.append(sum(known) if known else None)
    return found


def parsed(document: Mapping[str, Any] | None) -> Figures | None:
    """Return the figures in an answer to INFO; None where it is none of ours."""
    try:
        return None if document is None else Figures.of(document)
    except MALFORMED:
        return None
