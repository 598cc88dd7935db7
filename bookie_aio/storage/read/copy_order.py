"""Which of the stored copies of an entry count. Pure.

Invariant: among copies of an entry the one with the higher content term wins, and among those of equal
content term the newest, that is the one in the later segment, and there at the higher offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.listing import mark, meeting, runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.storage.segment.index import Run
    from bookie_aio.storage.segment.segment import Segment


class StoredCopy(NamedTuple):
    """A run and where it lies; the greater one holds the copy that counts."""

    content_term: int
    segment_id: int
    offset: int
    run: Run
    segment: Segment


def newest_copies(mine: StoredCopy, found: Sequence[StoredCopy], last: int) -> list[range]:
    """Return those entries of a run, up to `last`, of which no other run found holds a copy that counts more.

    They are given as ranges of the run's stride, ascending; all runs that hold copies have to be in `found`.
    """
    run = mine.run
    entry_ids = run.entry_ids
    if run.last > last:
        entry_ids = range(run.first, last + 1, run.stride)
    rivals = [
        one.run.entry_ids
        for one in found
        if one[:3] > mine[:3] and one.run.first <= run.last and one.run.last >= run.first
    ]
    if not rivals:
        return [entry_ids] if entry_ids else []
    # At once for each rival, however many entries it has: the loop stands still meanwhile.
    lost = bytearray(len(entry_ids))
    for rival in rivals:
        mark(lost, meeting(entry_ids, rival))
    return runs_of(entry_ids, lost, 0)
