"""Healing: when the mark that a bookie lost data of a ledger may be lifted (rule 4). Pure.

A mark has two effects. The bookie answers *unknown* in place of "no such entry", and it takes no ordinary
adds, since it may have lost the ledger's fence. Lifting it is right when neither is needed any more:

- *The entries.* A "no" can cut off an acknowledged entry only where a recovery asks for it. So the ledger
  must be CLOSED. Of an unbounded ledger, the bookie must not be in the last fragment, which is the one that
  takeovers ask for. And the bookie holds every entry that it owes of the fragments with an end.
- *The fence.* The bookie holds the ledger under the final term from then on, or under the term of an
  unbounded ledger's metadata. A takeover raises that term in the metadata before it fences any bookie. So no
  fence that was lost was higher.

An entry is *owed* by the bookie of its fragment whose seat is in the entry's write set.

The marks of all ledgers up to an id end together when none of these ledgers needs them. Then each of these
holds for each of these ids:

- The metadata store lists no such ledger, and none is created under the id any more.
- The ledger's own marks were lifted up to that number.
- The ledger is CLOSED, and no fragment names the bookie. It owes nothing, and stays fenced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from metadata.ids import TERM_FINAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from metadata.model.ledger import Fragment, LedgerMetadata


class Owed(NamedTuple):
    """Entries that a bookie owes, all of one content term."""

    entry_ids: range
    content_term: int


def why_marked(metadata: LedgerMetadata, bookie_id: str) -> str:
    """Return why the ledger's mark has to stay whatever the bookie holds; empty where it may be lifted."""
    if metadata.is_closed:
        return ""
    if not metadata.is_unbounded:
        return f"it is {metadata.state.value}: recover or close it first"
    if bookie_id in metadata.last_fragment.bookies:
        return f"{bookie_id} is in its last fragment: the mark can be lifted after the next ensemble change"
    return ""


def fence_of(metadata: LedgerMetadata) -> int:
    """Return the term that the bookie holds the ledger under once its mark is lifted."""
    return TERM_FINAL if metadata.is_closed else metadata.term


def owed(
    metadata: LedgerMetadata, fragments: Sequence[Fragment], last_entry: int | None, bookie_id: str
) -> Iterator[Owed]:
    """Yield the entries that the bookie owes of consecutive fragments.

    Args:
        metadata: has the quorums.
        fragments: the fragments.
        last_entry: the end of the last of them; None where it may still grow. It is left out then.
        bookie_id: the bookie.
    """
    size, quorum = metadata.ensemble_size, metadata.write_quorum
    ends = [fragment.first_entry - 1 for fragment in fragments[1:]]
    if last_entry is not None:
        ends.append(last_entry)
    for fragment, end in zip(fragments, ends, strict=False):
        if bookie_id not in fragment.bookies:
            continue
        seat = fragment.bookies.index(bookie_id)
        if size == quorum:
            yield Owed(range(fragment.first_entry, end + 1), fragment.content_term)
            continue
        for first in range(fragment.first_entry, fragment.first_entry + size):
            # The write set of an entry is the seats from its id modulo E on.
            if (seat - first) % size < quorum and first <= end:
                yield Owed(range(first, end + 1, size), fragment.content_term)


def is_settled(metadata: LedgerMetadata, bookie_id: str) -> bool:
    """Return whether the bookie owes nothing of a ledger that is over: its marks may end with all others."""
    return metadata.is_closed and not metadata.is_unbounded and is_unnamed(metadata, bookie_id)


def is_unnamed(metadata: LedgerMetadata, bookie_id: str) -> bool:
    """Return whether the bookie has no seat in the ledger, but for fragments in pages: no client asks it."""
    if any(bookie_id == each.bookie for each in metadata.absent):
        return False  # it may hold what a repair found nowhere else
    return all(bookie_id not in fragment.bookies for fragment in metadata.fragments)
