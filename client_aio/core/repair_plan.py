"""Planning a repair: the entries that a bookie owes, their other holders, and the metadata change (rule 14).

The theory. Repair puts one bookie in another's place in fragments that take no more entries: all fragments of
a CLOSED ledger, else all but the last. The entries of such a fragment are fixed. So every copy with an intact
checksum is as good as any other, and copying needs no term. The last fragment of a ledger that is not CLOSED
is left alone, for two reasons:

- Its writer may be alive. A copier cannot know which entries are acknowledged, and if it fenced to find out
  it would end a healthy writer.
- The ledger may be in recovery. A recovery counts answers "no such entry" of the ensemble that it began with.
  A replacement that holds nothing yet would give such answers for acknowledged entries.

To repair that fragment, the ledger is first recovered, which closes it.

The earlier fragments of an unbounded ledger stand in pages (`metadata.model.paged_list`). They are always
complete, since another fragment follows each of them.

A change of the metadata replaces one id in the `bookies` of one fragment, at the same index, and nothing
else. The compare-and-set of a writer or a recovery may conflict with such a change. It then takes the present
earlier fragments, and keeps its own last fragments.

Owns the arithmetic of what is owed. An *entry is owed* by a bookie of its fragment whose seat is in the
entry's write set, and by no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.listing import listed, mark, meeting, runs_of
from client_aio.core.quorum import write_set
from client_aio.core.read_plan import ClassRange, stride_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bookie_aio.wire.listing import Row
    from metadata.model.ledger import Absent, Fragment, LedgerMetadata


class Part(NamedTuple):
    """A fragment that can be repaired. If it is empty, `last_entry` is below `first_entry`."""

    first_entry: int
    last_entry: int
    content_term: int
    bookies: tuple[str, ...]


class Plan(NamedTuple):
    """The fragments to repair now, and whether the bookie is also in a last fragment that must wait."""

    parts: tuple[Part, ...]
    is_last_left: bool


class EntryRun(NamedTuple):
    """The entries `first`, `first + step`, … up to `last`."""

    first: int
    last: int
    step: int

    @property
    def entries(self) -> int:
        """Return how many entries there are."""
        return len(range(self.first, self.last + 1, self.step))


def entries_of(runs: Iterable[EntryRun]) -> int:
    """Return how many entries there are in runs of one ledger, which may overlap."""
    ends, count = dict[tuple[int, int], int](), 0
    for run in sorted(runs):
        key = run.step, run.first % run.step
        counted = ends.get(key, -1)
        first = max(run.first, counted + 1)
        first += (run.first - first) % run.step
        count += len(range(first, run.last + 1, run.step))
        ends[key] = max(counted, run.last)
    return count


class LostRuns:
    """The entries of one bookie's part of a fragment that no bookie returned."""

    def __init__(self) -> None:
        self._of_class: dict[int, list[EntryRun]] = {}

    def __bool__(self) -> bool:
        return bool(self._of_class)

    @property
    def entries(self) -> int:
        """Return how many entries are lost."""
        return sum(run.entries for run in self.runs())

    def add(self, rest: ClassRange, following: int | None) -> bool:
        """Note as lost the entries of a range before `following`; None: all of them.

        Returns whether that begins a run.
        """
        last = rest.last if following is None else following - rest.stride
        last = rest.first + (last - rest.first) // rest.stride * rest.stride
        runs = self._of_class.setdefault(rest.first % rest.stride, [])
        if runs and runs[-1].last + rest.stride == rest.first:
            runs[-1] = runs[-1]._replace(last=last)
        elif self.upto(rest) is None:
            runs.append(EntryRun(rest.first, last, rest.stride))
            return True
        return False

    def upto(self, rest: ClassRange) -> int | None:
        """Return the last entry of the lost run that holds the first entry of a range; None for none."""
        for run in self._of_class.get(rest.first % rest.stride, ()):
            if run.first <= rest.first <= run.last:
                return run.last
        return None

    def within(self, piece: ClassRange) -> list[ClassRange]:
        """Return the lost entries of a range."""
        return [
            piece._replace(first=max(piece.first, run.first), last=min(piece.last, run.last))
            for run in self._of_class.get(piece.first % piece.stride, ())
            if run.first <= piece.last and run.last >= piece.first
        ]

    def runs(self) -> list[EntryRun]:
        """Return all runs, by their first entry."""
        return sorted(run for runs in self._of_class.values() for run in runs)


def lists_first(wanted: ClassRange, listings: Iterable[Iterable[Row]]) -> bool:
    """Return whether one of the listings has the first entry of a range."""
    return any(
        row.content_term >= wanted.content_term and wanted.first in row.entry_ids
        for rows in listings
        for row in rows
    )


def first_held(rest: ClassRange, listings: Iterable[Iterable[Row]]) -> int | None:
    """Return the first entry of a range, behind its first, that one of the listings has; None for none."""
    later = rest.after(rest.first)
    if later is None:
        return None
    ids = range(later.first, later.last + 1, later.stride)
    marks = bytearray(len(ids))
    for rows in listings:
        for row in rows:
            if row.content_term >= later.content_term:
                mark(marks, meeting(ids, row.entry_ids))
    at = marks.find(1)
    return None if at < 0 else ids[at]


def complete_parts(fragments: Sequence[Fragment], last_entry: int | None) -> tuple[Part, ...]:
    """Return the complete fragments: all but the last, and the last too if its end is given.

    Args:
        fragments: consecutive fragments.
        last_entry: the last entry of the last fragment; None if it may still grow.
    """
    ends = [fragment.first_entry - 1 for fragment in fragments[1:]]
    if last_entry is not None:
        ends.append(last_entry)
    return tuple(
        Part(fragment.first_entry, end, fragment.content_term, fragment.bookies)
        for fragment, end in zip(fragments, ends, strict=False)
    )


def plan(metadata: LedgerMetadata, bookie_id: str) -> Plan:
    """Return the fragments of the head in which a bookie can be replaced, by the metadata as read."""
    parts = complete_parts(metadata.fragments, metadata.last_entry)
    is_last_left = not metadata.is_closed and bookie_id in metadata.last_fragment.bookies
    return Plan(tuple(part for part in parts if bookie_id in part.bookies), is_last_left)


def owed(metadata: LedgerMetadata, part: Part, bookie_id: str, entries_max: int) -> Iterator[ClassRange]:
    """Yield the entries that the bookie owes of a fragment, in ranges of at most `entries_max` entries.

    The `bookies` of a range are the other bookies of its write set. A different bookie comes first in each
    range, so that the reads are spread over them.
    """
    size, stride = metadata.ensemble_size, stride_of(metadata)
    seat = part.bookies.index(bookie_id)
    turn = 0
    for first in range(part.first_entry, min(part.first_entry + stride, part.last_entry + 1)):
        seats = write_set(first % size, size, metadata.write_quorum)
        if seat not in seats:
            continue
        others = [part.bookies[other] for other in seats if other != seat]
        ids = range(first, part.last_entry + 1, stride)
        for at in range(0, len(ids), entries_max):
            piece = ids[at : at + entries_max]
            start = turn % len(others) if others else 0
            turn += 1
            yield ClassRange(
                metadata.ledger_id,
                part.content_term,
                piece[0],
                piece[-1],
                stride,
                tuple(others[start:] + others[:start]),
            )


def split(wanted: ClassRange, rows: Iterable[Row]) -> tuple[list[ClassRange], list[ClassRange]]:
    """Split a range into the entries that a bookie's listing lacks, and the entries that it lists."""
    ids = range(wanted.first, wanted.last + 1, wanted.stride)
    marks = listed(ids, rows, wanted.content_term)
    lacking, there = (
        [wanted._replace(first=run[0], last=run[-1]) for run in runs_of(ids, marks, value)]
        for value in (0, 1)
    )
    return lacking, there


def replaced(
    metadata: LedgerMetadata, part: Part, old: str, new: str, absent: Absent | None = None
) -> LedgerMetadata | None:
    """Put `new` in the place of `old` in a fragment of the present metadata; also called after a conflict.

    Args:
        absent: a record to add.

    Returns:
        The metadata to write; None if the fragment is no longer the planned one, because another client
        repaired it. The plan must then be made anew.
    """
    for index, fragment in enumerate(metadata.fragments):
        if fragment.first_entry == part.first_entry:
            is_same = part in plan(metadata, old).parts and new not in fragment.bookies
            if not is_same:
                return None
            changed = metadata.replace_bookie(index, old, new)
            return changed if absent is None else changed.with_absent(absent)
    return None


def replaced_in_page(
    fragments: Sequence[Fragment], last_entry: int, part: Part, old: str, new: str
) -> tuple[Fragment, ...] | None:
    """Do as `replaced`, in the present contents of a page.

    Args:
        fragments: the page's fragments that have not been trimmed.
        last_entry: the last entry of the last of them.

    Returns:
        The fragments for the page that takes its place; None if the fragment is no longer the planned one.
        The plan must then be made anew.
    """
    if part not in complete_parts(fragments, last_entry) or old not in part.bookies or new in part.bookies:
        return None
    return tuple(
        fragment.replace_bookie(old, new) if fragment.first_entry == part.first_entry else fragment
        for fragment in fragments
    )
