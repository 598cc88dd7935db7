"""The order of the stored copies of an entry, of which only the greatest counts. Pure.
Invariant: among copies of an entry the copy with the highest content term counts. Among copies of equal
content term the newest counts: the copy in the latest segment, and there at the highest offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.listing import mark, meeting, runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.storage.segment.index import Run
    from bookie_aio.storage.segment.segment import Segment


class StoredCopy(NamedTuple):
    """A run and its place. Of two runs that hold an entry, the greater holds the copy that counts."""

    content_term: int
    segment_id: int
    offset: int
    run: Run
    segment: Segment


def newest_copies(mine: StoredCopy, found: Sequence[StoredCopy], last: int) -> list[range]:
    """Return the entries of a run, up to `last`, whose copy in this run is the copy that counts.

    They are returned as ranges of the run's stride, ascending. All runs that hold copies have to be in
    `found`.
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
    # One step for each rival, not for each entry: the event loop is blocked meanwhile.
    lost = bytearray(len(entry_ids))
    for rival in rivals:
        mark(lost, meeting(entry_ids, rival))
    return runs_of(entry_ids, lost, 0)
