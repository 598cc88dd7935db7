"""Planning a repair: what a bookie owed, who else holds it, and what changes in the metadata (rule 14).

The theory. Repair puts one bookie in another's place in fragments that take no more entries: all of a CLOSED
ledger, else all but the last. There the entries that the ledger consists of are fixed, so whichever copy
carries an intact checksum is as good as any other, and copying needs no term. The last fragment of a ledger
that is not CLOSED is left alone, for two reasons:

- its writer may live. A copier cannot tell which of its entries are acknowledged, and one that fenced to
  find out would end a writer that is well;
- somebody may be recovering it. A recovery counts answers "no such entry" of the ensemble that it began
  with; a newcomer that holds nothing yet would give such answers for entries that are acknowledged.

So that fragment is repaired by recovering the ledger, which closes it, and then like any other.

The earlier fragments of an unbounded ledger stand in pages (`metadata.model.paged_list`). Those are always
complete: each is followed by another one.

A change of the metadata replaces one id in the `bookies` of one fragment, at the same index, and nothing
else. A writer or a recovery that finds its compare-and-set in conflict with one takes the earlier fragments
as they are now, and keeps its own last ones.

Owns the arithmetic of what is owed. An *entry is owed* by a bookie of its fragment whose seat is in the
entry's write set, and by no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.listing import listed, runs_of
from client_aio.core.quorum import write_set
from client_aio.core.read_plan import ClassRange, stride_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bookie_aio.wire.listing import Row
    from metadata.model.ledger import Fragment, LedgerMetadata


class Part(NamedTuple):
    """A fragment that can be repaired; `last_entry` is below `first_entry` where it holds nothing."""

    first_entry: int
    last_entry: int
    content_term: int
    bookies: tuple[str, ...]


class Plan(NamedTuple):
    """What is to be repaired now, and whether the bookie is in a last fragment that must wait."""

    parts: tuple[Part, ...]
    is_last_left: bool


def complete_parts(fragments: Sequence[Fragment], last_entry: int | None) -> tuple[Part, ...]:
    """Return the fragments that are complete: all but the last, and that one if it is said where it ends.

    Args:
        fragments: some that follow one another.
        last_entry: the last one's; None where it may still grow.
    """
    ends = [fragment.first_entry - 1 for fragment in fragments[1:]]
    if last_entry is not None:
        ends.append(last_entry)
    return tuple(
        Part(fragment.first_entry, end, fragment.content_term, fragment.bookies)
        for fragment, end in zip(fragments, ends, strict=False)
    )


def plan(metadata: LedgerMetadata, bookie_id: str) -> Plan:
    """Return the fragments of the head that a bookie can be replaced in, by the metadata as read."""
    parts = complete_parts(metadata.fragments, metadata.last_entry)
    is_last_left = not metadata.is_closed and bookie_id in metadata.last_fragment.bookies
    return Plan(tuple(part for part in parts if bookie_id in part.bookies), is_last_left)


def owed(metadata: LedgerMetadata, part: Part, bookie_id: str, entries_max: int) -> Iterator[ClassRange]:
    """Yield what the bookie owes of a fragment, cut into ranges of at most `entries_max` entries.

    The `bookies` of a range are the others of its write set; which of them comes first goes round, so that
    the work is spread over them.
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
    """Cut a range into what a bookie's listing lacks, and what it lists."""
    ids = range(wanted.first, wanted.last + 1, wanted.stride)
    marks = listed(ids, rows, wanted.content_term)
    lacking, there = (
        [wanted._replace(first=run[0], last=run[-1]) for run in runs_of(ids, marks, value)]
        for value in (0, 1)
    )
    return lacking, there


def replaced(metadata: LedgerMetadata, part: Part, old: str, new: str) -> LedgerMetadata | None:
    """Put `new` in the place of `old` in a fragment, by the metadata as they are now (after a conflict, too).

    Returns:
        The metadata to write; None when the fragment is no longer the one that was planned for (somebody
        else repaired it), so that the plan is to be made anew.
    """
    for index, fragment in enumerate(metadata.fragments):
        if fragment.first_entry == part.first_entry:
            is_same = part in plan(metadata, old).parts and new not in fragment.bookies
            return metadata.replace_bookie(index, old, new) if is_same else None
    return None


def replaced_in_page(
    fragments: Sequence[Fragment], last_entry: int, part: Part, old: str, new: str
) -> tuple[Fragment, ...] | None:
    """Do as `replaced`, in a page as it is now.

    Args:
        fragments: those of the page that count: it may have been trimmed since the repair was planned.
        last_entry: the last one's.

    Returns:
        The fragments for the page that takes its place; None when that which was planned for is not there as
        it was, so that the plan is to be made anew.
    """
    if part not in complete_parts(fragments, last_entry) or old not in part.bookies or new in part.bookies:
        return None
    return tuple(
        fragment.replace_bookie(old, new) if fragment.first_entry == part.first_entry else fragment
        for fragment in fragments
    )
