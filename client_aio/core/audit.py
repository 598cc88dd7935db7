"""Auditing: which ledgers lack copies, and which of them to repair first (rule 14). Pure.

The theory. A *layout* is what the audit has to know of a ledger: Qw, and the ensembles of its fragments.
Many ledgers share one layout, so the index goes from a bookie to layouts, and from a layout to ledgers. Its
memory grows with the ledgers by a few machine words each.

Fragments are *complete* if they take no more entries: all of a CLOSED ledger, else all but the last. Only
these are repaired (`client_aio.core.repair_plan`), so only these make a task. The last fragment of an open
ledger is counted apart: its writer replaces a bookie that is gone when it adds the next time.

The *good copies* of a ledger are those of the entry that has the fewest. That is the smallest number of good
bookies in any write set of its complete fragments. Ledgers with the fewest come first.

A bookie is *lost* when it was seen to be gone for longer than the delay. Time counts only while an auditor
looks: a look that comes late counts for twice the interval at most. So an auditor that stood still, or was
elected a moment ago, holds nobody for lost too early. A bookie that comes back is lost no more.

A bookie that comes back may lack what was written without it. Its ledgers are *checked* when it has been
back for the delay: its list of entries is compared with what it owes. One that was stopped may lack adds that
were in flight. So a rolling restart under load makes tasks, for the ledgers of these adds only.

A bookie draws a nonce at each start. A start is *settled* when all ledgers of the bookie were checked after
it. The memory of an auditor about a bookie that came back belongs to a start that is not settled. So do a
restart that no auditor saw, and what checks found and no task says yet. The next auditor knows the settled
starts. It takes every other one for a bookie that has just come back, and so loses nothing of these.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
import sys
from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from client_aio.core.placement import spread
from client_aio.core.quorum import write_set
from metadata.access.repair_tasks import COPIES_MAX
from metadata.model.ledger import LedgerState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from client_aio.core.repair_plan import Part
    from metadata.access.bookies import BookieRecord
    from metadata.access.repair_tasks import WorkerRecord
    from metadata.model.ledger import Fragment, LedgerMetadata

Ensemble = tuple[str, ...]


class Layout(NamedTuple):
    """The ensembles of a ledger."""

    write_quorum: int
    complete: tuple[Ensemble, ...]
    """The ensembles of the complete fragments, each once, sorted."""
    growing: Ensemble
    """The ensemble of the last fragment, if the ledger is not CLOSED; else empty."""
    in_recovery: bool = False

    @property
    def bookies(self) -> list[str]:
        """Return all bookies that the ledger names, each once."""
        names = [name for ensemble in (*self.complete, self.growing) for name in ensemble]
        return list(dict.fromkeys(names))

    def copies(self, bad: Collection[str]) -> int:
        """Return the number of good copies of the entry that has the fewest; Qw if there is no fragment."""
        return min(
            (good_copies(ensemble, self.write_quorum, bad) for ensemble in self.complete),
            default=self.write_quorum,
        )

    def concerned(self, bad: Collection[str]) -> list[str]:
        """Return the bad bookies that complete fragments name."""
        return sorted({name for ensemble in self.complete for name in ensemble if name in bad})


def good_copies(ensemble: Sequence[str], write_quorum: int, bad: Collection[str]) -> int:
    """Return the smallest number of bookies in a write set of one ensemble that are not bad."""
    size = len(ensemble)
    is_good = [name not in bad for name in ensemble]
    return min(sum(is_good[seat] for seat in write_set(first, size, write_quorum)) for first in range(size))


def layout_of(metadata: LedgerMetadata, fragments: Iterable[Fragment] = ()) -> Layout:
    """Return the layout of a ledger.

    Args:
        metadata: as read, with the fragments of the head.
        fragments: those in pages, of an unbounded ledger. All of them are complete.
    """
    complete = {fragment.bookies for fragment in fragments}
    head = metadata.fragments if metadata.is_closed else metadata.fragments[:-1]
    complete.update(fragment.bookies for fragment in head)
    growing = () if metadata.is_closed else metadata.last_fragment.bookies
    in_recovery = metadata.state is LedgerState.IN_RECOVERY
    return Layout(metadata.write_quorum, tuple(sorted(complete)), growing, in_recovery)


class Lacking(NamedTuple):
    """A ledger that lacks copies: the good copies of its scarcest entry, and the bookies concerned."""

    copies: int
    ledger_id: int
    bookies: tuple[str, ...]


def dealt(sizes: Sequence[int], places: int, is_even: bool) -> list[int]:
    """Deal places out to classes, the first ones first; return how many each class gets.

    Args:
        sizes: how many ask for a place in each class.
        places: how many there are.
        is_even: whether every class may have its even share of one half of them.
    """
    share = places // (2 * len(sizes)) if is_even and sizes else 0
    counts = [min(size, share) for size in sizes]
    left = places - sum(counts)
    for number, size in enumerate(sizes):
        more = min(size - counts[number], left)
        counts[number] += more
        left -= more
    return counts


class LedgerIndex:
    """Which ledgers name which bookie."""

    def __init__(self) -> None:
        self._layout_of: dict[int, Layout] = {}
        self._ledgers_of: dict[Layout, set[int]] = {}
        self._layouts_of: dict[str, dict[Layout, None]] = {}
        self._shared: dict[Layout, Layout] = {}
        self._growing: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._layout_of)

    def __contains__(self, ledger_id: int) -> bool:
        return ledger_id in self._layout_of

    @property
    def growing(self) -> Collection[int]:
        """Return the ledgers that are not CLOSED."""
        return self._growing.keys()

    def ids(self) -> list[int]:
        """Return all ledgers, ascending."""
        return sorted(self._layout_of)

    def note(self, ledger_id: int, layout: Layout) -> bool:
        """Enter a ledger as it was read last; return whether anything has changed."""
        known = self._layout_of.get(ledger_id)
        if known == layout:
            return False
        if known is not None:
            self.drop(ledger_id)
        layout = self._shared.setdefault(layout, layout)
        self._layout_of[ledger_id] = layout
        if layout.growing:
            self._growing[ledger_id] = None
        ledgers = self._ledgers_of.get(layout)
        if ledgers is not None:
            ledgers.add(ledger_id)
            return True
        self._ledgers_of[layout] = {ledger_id}
        for name in layout.bookies:
            self._layouts_of.setdefault(name, {})[layout] = None
        return True

    def drop(self, ledger_id: int) -> None:
        """Remove a ledger that was deleted."""
        layout = self._layout_of.pop(ledger_id, None)
        if layout is None:
            return
        self._growing.pop(ledger_id, None)
        ledgers = self._ledgers_of[layout]
        ledgers.remove(ledger_id)
        if ledgers:
            return
        del self._ledgers_of[layout], self._shared[layout]
        for name in layout.bookies:
            layouts = self._layouts_of[name]
            del layouts[layout]
            if not layouts:
                del self._layouts_of[name]

    def bookies(self) -> list[str]:
        """Return the bookies that some ledger names, sorted."""
        return sorted(self._layouts_of)

    def ledgers_of(self, bookie_id: str) -> list[int]:
        """Return the ledgers that name a bookie, ascending."""
        return sorted(
            ledger_id
            for layout in self._layouts_of.get(bookie_id, ())
            for ledger_id in self._ledgers_of[layout]
        )

    def named(self, ledger_id: int, bookies: Iterable[str]) -> list[str]:
        """Return those of the bookies that a ledger names."""
        layout = self._layout_of.get(ledger_id)
        return [name for name in bookies if layout in self._layouts_of.get(name, ())]

    def concerned(self, ledger_id: int, bad: Collection[str]) -> list[str]:
        """Return the bad bookies that a ledger's complete fragments name; none for an unknown ledger."""
        layout = self._layout_of.get(ledger_id)
        return [] if layout is None else layout.concerned(bad)

    def lacking(
        self, bad: Collection[str], count_max: int = sys.maxsize, without: Mapping[int, object] | None = None
    ) -> tuple[list[Lacking], int]:
        """Return ledgers of which a complete fragment names a bad bookie; the fewest copies come first.

        The work grows with the layouts concerned, and then with the ledgers returned.

        Args:
            bad: the bookies that do not count.
            count_max: at most so many ledgers are returned, of those with the fewest copies.
            without: ledgers that are left out.

        Returns:
            The ledgers, and how many there are in all.
        """
        layouts = dict.fromkeys(layout for name in sorted(bad) for layout in self._layouts_of.get(name, ()))
        by_copies: dict[int, list[tuple[Layout, tuple[str, ...]]]] = {}
        for layout in layouts:
            concerned = tuple(layout.concerned(bad))
            if concerned:
                by_copies.setdefault(layout.copies(bad), []).append((layout, concerned))
        found: list[Lacking] = []
        classes = []
        for copies, rows in sorted(by_copies.items()):
            here = []
            for layout, concerned in rows:
                ledgers = self._ledgers_of[layout]
                here.append((ledgers.difference(without) if without else ledgers, concerned))
            classes.append((copies, here))
        sizes = [sum(len(ledgers) for ledgers, _ in here) for _, here in classes]
        for (copies, here), places in zip(classes, dealt(sizes, count_max, bool(without)), strict=True):
            each = (Lacking(copies, one, concerned) for ledgers, concerned in here for one in ledgers)
            found.extend(itertools.islice(each, places))
        return sorted(found), sum(sizes)

    def on_one_rack(self, racks: Mapping[str, str], candidates: Collection[str]) -> list[int]:
        """Return the ledgers with a complete fragment that an exchange of one bookie would spread better.

        Args: as those of `client_aio.core.placement.spread`. The work grows with the layouts.
        """
        return sorted(
            ledger_id
            for layout, ledgers in self._ledgers_of.items()
            if any(spread(one, layout.write_quorum, racks, candidates) for one in layout.complete)
            for ledger_id in ledgers
        )

    def growing_on(self, bad: Collection[str]) -> list[int]:
        """Return the ledgers not CLOSED whose last fragment names a bad bookie, ascending."""
        return sorted(one for one in self._growing if not set(bad).isdisjoint(self._layout_of[one].growing))

    def unsettled(self, bad: Collection[str]) -> list[int]:
        """Return the ledgers in recovery, and those whose last fragment names a bad bookie, ascending."""
        recovering = [one for one in self._growing if self._layout_of[one].in_recovery]
        return sorted({*recovering, *self.growing_on(bad)})


class BookieStates:
    """For how long bookies were seen to be gone, or to be back."""

    def __init__(
        self,
        delay_s: float,
        look_s_max: float,
        gone_s: Mapping[str, float] | None = None,
        settled: Mapping[str, str] | None = None,
    ) -> None:
        """Begin with what an auditor before this one has seen.

        Args:
            delay_s: a bookie that is gone for longer is lost.
            look_s_max: a look counts for this much time at most.
            gone_s: for how long each bookie was seen to be gone. Those that are back by now do not count.
            settled: what bookies drew at the start whose ledgers were checked.
        """
        self._delay_s = delay_s
        self._look_s_max = look_s_max
        self.gone_s: dict[str, float] = dict(gone_s or {})
        self._back_s: dict[str, float] = {}
        self._starts: dict[str, str] = dict(settled or {})

    @property
    def lost(self) -> list[str]:
        """Return the bookies that are gone for longer than the delay, sorted."""
        return sorted(name for name, gone_s in self.gone_s.items() if gone_s > self._delay_s)

    def look(self, named: Iterable[str], running: Mapping[str, str], elapsed_s: float) -> list[str]:
        """Note a look at the bookies.

        Args:
            named: the bookies that some ledger names.
            running: what a running bookie drew at its start, by its id.
            elapsed_s: the time since the look before.

        Returns:
            The bookies that were away, or whose start is not settled, and that have now been there for the
            delay: their ledgers are to be checked.
        """
        elapsed_s = min(elapsed_s, self._look_s_max)
        wanted = set(named)
        for name in self._back_s.keys() - running.keys():
            del self._back_s[name]  # Also of one that has left for good: no ledger names it.
        for name in sorted(wanted - running.keys()):
            # The time before this look counts only if the bookie was seen to be gone at its beginning.
            self.gone_s[name] = self.gone_s[name] + elapsed_s if name in self.gone_s else 0.0
        for name in [one for one in self.gone_s if one in running or one not in wanted]:
            del self.gone_s[name]
            if name in running:
                self._back_s[name] = 0.0
        for name, start in running.items():
            if self._starts.get(name) != start:
                self._back_s[name] = 0.0
            self._starts[name] = start
        settled = []
        for name in list(self._back_s):
            self._back_s[name] += elapsed_s
            if self._back_s[name] > self._delay_s:
                del self._back_s[name]
                settled.append(name)
        return sorted(settled)


class Checks:
    """The ledgers whose replicas are to be checked, each with the time from which on it may be.

    Some are urgent: a bookie says that it lost data. They come first, and leave one place in `_SHARE` to the
    others, so that nothing waits for ever where data are lost again and again.
    """

    _SHARE = 5

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._urgent: set[int] = set()
        self._heaps: dict[bool, list[tuple[float, int]]] = {True: [], False: []}  # of the urgent ones, too

    def __len__(self) -> int:
        return len(self._due)

    @property
    def first_due(self) -> float:
        """Return the time of the check that is due first; infinity for none."""
        return min(self._first(is_urgent=True), self._first(is_urgent=False))

    def _first(self, *, is_urgent: bool) -> float:
        heap = self._heaps[is_urgent]
        while heap and self._due.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def add(self, ledger_id: int, due: float, *, is_urgent: bool = False) -> None:
        """Have a ledger checked at that time or later. An earlier time and urgency that it has stay."""
        known = self._due.get(ledger_id, math.inf)
        becomes_urgent = is_urgent and ledger_id not in self._urgent
        if due >= known and not becomes_urgent:
            return
        self._due[ledger_id] = due = min(due, known)
        if is_urgent:
            self._urgent.add(ledger_id)
        heapq.heappush(self._heaps[ledger_id in self._urgent], (due, ledger_id))

    def take(self, now: float, count: int) -> dict[int, bool]:
        """Remove up to `count` ledgers that are due; return for each whether it is urgent."""
        taken: dict[int, bool] = {}
        others = int(self._first(is_urgent=False) <= now) * max(count // self._SHARE, 1)
        for is_urgent, room in ((True, max(count - others, 1)), (False, count), (True, count)):
            while self._first(is_urgent=is_urgent) <= now and len(taken) < room:
                _, ledger_id = heapq.heappop(self._heaps[is_urgent])
                del self._due[ledger_id]
                taken[ledger_id] = ledger_id in self._urgent
                self._urgent.discard(ledger_id)
        return taken


class Rotation:
    """Takes turns through ledgers in ascending order, again and again, at a bounded rate."""

    def __init__(self, interval_s: float, behind: int = -1) -> None:
        """Go through all of them once within `interval_s`, from behind a ledger on."""
        self._interval_s = interval_s
        self._credit = 0.0
        self.behind = behind
        """The ledger whose turn was the last one."""

    def next(self, ids: Sequence[int], elapsed_s: float, count_max: int) -> list[int]:
        """Return the ledgers whose turn has come within the elapsed time.

        Args:
            ids: all of them now, ascending.
            elapsed_s: the time since the call before.
            count_max: at most so many; a rotation that is behind does not catch up.
        """
        self._credit = min(self._credit + len(ids) * elapsed_s / self._interval_s, float(count_max))
        count = min(int(self._credit), len(ids))
        self._credit -= count
        at = bisect_right(ids, self.behind)
        taken = [ids[(at + step) % len(ids)] for step in range(count)]
        if taken:
            self.behind = taken[-1]
        return taken


class ReplicaState(NamedTuple):
    """A bookie's part of one complete fragment, as the bookie listed it."""

    bookie_id: str
    first_entry: int
    is_whole: bool
    """Whether it lists every entry that it owes."""
    is_marked: bool
    """Whether it says that it lost data of the ledger."""
    is_silent: bool
    """Whether it could not be asked."""


class Seats(NamedTuple):
    """The bookies of a ledger that a worker has to care for, by the way it does that."""

    in_place: tuple[str, ...]
    """Bookies that answer, and lack entries, are in doubt, or have a mark that can be lifted: copied to."""
    replaced: tuple[str, ...]
    """Bookies that are lost and do not answer, or that leave: others get their seats."""
    unknown: tuple[str, ...]
    """Bookies that do not answer, and are not held for lost: left as they are."""
    marked: tuple[str, ...] = ()
    """Those of `in_place` that have a mark, and nothing else is the matter with them."""


def _is_bad(replica: ReplicaState, marks_stay: Collection[str], doubted: Collection[str]) -> bool:
    """Return whether a bookie that answered may lack entries; the arguments are as of `seats_to_repair`."""
    is_marked = replica.is_marked and replica.bookie_id not in marks_stay
    return not replica.is_whole or replica.bookie_id in doubted or is_marked


def seats_to_repair(
    replicas: Iterable[ReplicaState],
    lost: Collection[str],
    running: Collection[str],
    marks_stay: Collection[str],
    leaving: Collection[str] = (),
    doubted: Collection[str] = (),
) -> Seats:
    """Return what to do about the bookies of a ledger.

    Args:
        replicas: those of all complete fragments.
        lost: the bookies that an auditor holds for lost.
        running: the bookies that are registered now. A lost bookie that is back is repaired in its place.
        marks_stay: the bookies whose marks cannot be lifted now. A mark alone of such a bookie needs nothing.
        leaving: the bookies that an operator has ordered to leave, running or not.
        doubted: the bookies of which somebody knows more than they list, such as entries that cannot be read.
    """
    in_place: dict[str, None] = {}
    replaced: dict[str, None] = {}
    unknown: dict[str, None] = {}
    lacking = set(doubted)
    for replica in replicas:
        if not replica.is_whole:
            lacking.add(replica.bookie_id)
        if replica.bookie_id in leaving:
            replaced[replica.bookie_id] = None
        elif replica.is_silent:
            is_gone = replica.bookie_id in lost and replica.bookie_id not in running
            (replaced if is_gone else unknown)[replica.bookie_id] = None
        elif _is_bad(replica, marks_stay, doubted):
            in_place[replica.bookie_id] = None
    marked = tuple(one for one in in_place if one not in lacking)
    return Seats(tuple(in_place), tuple(replaced), tuple(unknown), marked)


def marks_stay(metadata: LedgerMetadata) -> Collection[str]:
    """Return the bookies of a ledger that keep a mark of lost data whatever they hold (rule 4)."""
    if metadata.is_closed:
        return ()
    if metadata.is_unbounded:
        return metadata.last_fragment.bookies
    return {name for fragment in metadata.fragments for name in fragment.bookies}


def copies_by_replicas(
    write_quorum: int,
    replicas: Iterable[ReplicaState],
    marks_stay: Collection[str],
    doubted: Collection[str] = (),
) -> int:
    """Return the good copies that the scarcest entry has at least, by what the bookies listed.

    A silent bookie has none. Nor has one that is marked or doubted: which of its entries are bad is unknown.

    Args:
        marks_stay: as of `seats_to_repair`. Such a mark alone tells of no bad copy that can be made good.
        doubted: as of `seats_to_repair`.
    """
    by_fragment: dict[int, list[ReplicaState]] = {}
    for replica in replicas:
        by_fragment.setdefault(replica.first_entry, []).append(replica)
    fewest = write_quorum
    for seats in by_fragment.values():
        bad = {one.bookie_id for one in seats if one.is_silent or _is_bad(one, marks_stay, doubted)}
        fewest = min(fewest, good_copies([one.bookie_id for one in seats], write_quorum, bad))
    return fewest


class Ties(enum.Flag):
    """Why a bookie must not leave the cluster yet, because of one ledger."""

    NONE = 0
    COPIES = enum.auto()
    """A complete fragment names it: its entries are to be copied, and its seat to be given away."""
    WRITER = enum.auto()
    """The last fragment of an OPEN ledger names it: the ledger's writer moves off it."""
    RECOVERY = enum.auto()
    """A recovery is under way that may have stored entries on it, under names that no metadata have yet."""
    ABSENT = enum.auto()
    """It is recorded as one that may hold what a repair found nowhere."""


def ties_of(metadata: LedgerMetadata, layout: Layout, bookie_id: str, *, is_held: bool) -> Ties:
    """Return why a ledger ties a bookie that is to leave.

    Args:
        metadata: as read, with the layout that includes the fragments in pages.
        is_held: whether the bookie holds anything of the ledger, as it says itself.
    """
    ties = Ties.NONE
    if any(bookie_id in ensemble for ensemble in layout.complete):
        ties |= Ties.COPIES
    is_growing = bookie_id in layout.growing
    if metadata.state is LedgerState.IN_RECOVERY and (is_growing or is_held):
        ties |= Ties.RECOVERY
    elif is_growing:
        ties |= Ties.WRITER
    if any(one.bookie == bookie_id for one in metadata.absent):
        ties |= Ties.ABSENT
    return ties


def has_substitute(layout: Layout, bookie_id: str, usable: Collection[str]) -> bool:
    """Return whether each fragment that names a bookie can have one of the usable bookies in its place."""
    return all(
        any(name != bookie_id and name not in ensemble for name in usable)
        for ensemble in (*layout.complete, layout.growing)
        if bookie_id in ensemble
    )


def least_bytes_owed(metadata: LedgerMetadata, bookie_id: str) -> int:
    """Return payload bytes of a ledger that a bookie owes for certain; 0 where the metadata do not say.

    They say how long a ledger is, and not which fragment has how much of that, nor what was trimmed.
    """
    is_told = metadata.is_closed and not (metadata.is_unbounded or metadata.absent or metadata.given_up)
    holds_all = metadata.ensemble_size == metadata.write_quorum and all(
        bookie_id in fragment.bookies for fragment in metadata.fragments
    )
    return (metadata.length or 0) if is_told and holds_all else 0


def has_room(least_bytes: int, usable: Iterable[BookieRecord]) -> bool:
    """Return whether so many bytes may have room on some bookies. False is certain, unless these free some.

    A bookie announces its free space again when that has changed by a twentieth of its disks, or a tenth.
    """
    room = 0.0
    for record in usable:
        if record.free_bytes is None or record.disk_bytes is None:
            return True
        room += min(record.free_bytes + record.disk_bytes / 20, record.free_bytes / 0.9)
    return least_bytes <= room


class Pace:
    """How long the rest takes, by what was done so far; and for how long nothing has been done."""

    def __init__(self, now: float, left: int) -> None:
        self._began = self._moved_at = self._worked_at = now
        self._most = self.left = left
        self._workers: dict[str, WorkerRecord] = {}

    def note(self, now: float, left: int) -> None:
        """Note how much is left. Additions count as part of the whole."""
        if left != self.left:
            self._moved_at = now
        self._most += max(left - self.left, 0)
        self.left = left

    @property
    def done(self) -> int:
        """Return how much was done."""
        return self._most - self.left

    def estimate_s(self, now: float) -> float | None:
        """Return how long the rest takes; None where nothing was done yet."""
        if not self.left:
            return 0.0
        return (now - self._began) * self.left / self.done if self.done else None

    def note_workers(self, now: float, records: Iterable[WorkerRecord]) -> None:
        """Note what the workers of the cluster say of themselves, whatever ledgers they repair.

        A ledger that was repaired is progress, and so are bytes that were read of one that is under way. An
        attempt that failed is none: some tasks fail again and again.
        """
        before, self._workers = self._workers, {one.name: one for one in records}
        for one in self._workers.values():
            was = before.get(one.name, one)
            is_at_it = one.ledger_id is not None and one.ledger_id == was.ledger_id
            if one.repaired > was.repaired or (is_at_it and one.bytes_read > was.bytes_read):
                self._worked_at = now

    def note_pause(self, now: float) -> None:
        """Note that nothing may move now."""
        self._moved_at = now

    def still_s(self, now: float) -> float:
        """Return for how long the count has not changed."""
        return now - self._moved_at

    def idle_s(self, now: float) -> float:
        """Return for how long the count has not changed, and no worker has got on with anything."""
        return now - max(self._moved_at, self._worked_at)


def fewest_copies(
    part: Part, write_quorum: int, unread: Collection[str], bad: Mapping[str, Iterable[int]]
) -> int:
    """Return the good copies of the scarcest entry of a fragment, or of a part of one, that was verified.

    Args:
        part: its entries and its bookies. If it has no entries, its copies count as complete.
        write_quorum: Qw.
        unread: the bookies of which no copy counts.
        bad: by bookie, the entries of which its copy is missing or damaged.
    """
    size = len(part.bookies)
    counts = Counter(entry for name, ids in bad.items() if name not in unread for entry in ids)

    def good(entry_id: int) -> int:
        seats = write_set(entry_id % size, size, write_quorum)
        return sum(part.bookies[seat] not in unread for seat in seats) - counts[entry_id]

    # Every write set is that of one of the first E entries.
    first_ones = range(part.first_entry, min(part.last_entry, part.first_entry + size - 1) + 1)
    return min(map(good, itertools.chain(first_ones, counts)), default=write_quorum)


def condition_of(copies: int, write_quorum: int) -> Condition:
    """Return the condition of a ledger whose scarcest entry has so many good copies."""
    if copies >= write_quorum:
        return Condition.HEALTHY
    return Condition.AT_RISK if copies <= 1 else Condition.DEGRADED


def retry_after_s(attempts: int, first_s: float, longest_s: float) -> float:
    """Return how long a task rests after so many failed attempts: twice as long after each."""
    return 0.0 if attempts <= 0 else min(first_s * 2.0 ** min(attempts - 1, 30), longest_s)


class Condition(enum.IntEnum):
    """The condition of a cluster; the exit code of `cluster status`."""

    HEALTHY = 0
    DEGRADED = 1
    """Copies are lacking, or soon will be; another loss would lose nothing."""
    AT_RISK = 2
    """Some entry has one good copy at most, or none."""

    @property
    def label(self) -> str:
        """Return its name in words."""
        return self.name.lower().replace("_", " ")


class Problem(NamedTuple):
    """One thing that is wrong, or worth knowing."""

    condition: Condition
    text: str


def judge(
    *,
    down: Mapping[str, int],
    impaired: Sequence[str],
    ordered: Mapping[str, str],
    damaged: Sequence[str],
    lacking: Mapping[int, int],
    tasks: Mapping[int, int],
    growing_on_down: int,
    absent: int,
    unreadable: int,
    is_paused: bool,
    has_auditor: bool,
) -> list[Problem]:
    """Return what is wrong with a cluster, the worst first.

    Args:
        down: for each bookie that is registered nowhere now, how many ledgers name it.
        impaired: bookies that take no entries, or give no answer, without an operator's order.
        ordered: the mode of the order of each bookie that has one.
        damaged: bookies with marks of lost data.
        lacking: how many ledgers name bookies that are down in complete fragments, by good copies.
        tasks: how many repair tasks there are, by good copies; `COPIES_MAX` for those about racks.
        growing_on_down: how many ledgers that are not CLOSED name such a bookie in their last fragment.
        absent: how many ledgers have entries that no bookie returned to a repair.
        unreadable: how many ledgers' metadata do not parse.
        is_paused: whether auto recovery is paused.
        has_auditor: whether an auditor is elected and a worker is alive.
    """
    found: list[Problem] = []

    def note(condition: Condition, text: str) -> None:
        found.append(Problem(condition, text))

    for what, by_copies in (("ledgers lack copies on bookies that are down", lacking),
                            ("ledgers wait for repair", tasks)):  # fmt: skip
        for copies, count in sorted(by_copies.items()):
            if copies == COPIES_MAX:
                note(Condition.DEGRADED, f"{count:,} ledgers wait for a place on more than one rack")
                continue
            condition = Condition.AT_RISK if copies <= 1 else Condition.DEGRADED
            note(condition, f"{count:,} {what}, good copies of some entries: {copies}")
    if absent:
        note(Condition.AT_RISK, f"{absent:,} ledgers have entries that can be had from no bookie")
    if unreadable:
        note(Condition.AT_RISK, f"the metadata of {unreadable:,} ledgers do not parse")
    if growing_on_down:
        note(
            Condition.DEGRADED, f"{growing_on_down:,} ledgers that are not closed name a bookie that is down"
        )
    for bookie_id, ledgers in sorted(down.items()):
        if ledgers:
            note(Condition.DEGRADED, f"bookie {bookie_id} is down, and {ledgers:,} ledgers name it")
        else:
            note(Condition.HEALTHY, f"bookie {bookie_id} is down, and no ledger names it")
    for bookie_id in impaired:
        note(Condition.DEGRADED, f"bookie {bookie_id} is read-only, or gives no answer")
    for bookie_id, mode in sorted(ordered.items()):
        note(Condition.HEALTHY, f"bookie {bookie_id} is {mode}, by an operator's order")
    for bookie_id in damaged:
        note(Condition.DEGRADED, f"bookie {bookie_id} lost data of some ledgers")
    if is_paused:
        note(Condition.DEGRADED, "auto recovery is paused")
    elif not has_auditor:
        note(Condition.HEALTHY, "nobody repairs: no auditor is elected, or no worker is alive")
    return sorted(found, key=lambda problem: -problem.condition)
