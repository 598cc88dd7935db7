"""Terms: how an unbounded ledger goes from one writer to the next.

The theory. A bounded ledger has one writer and an end. An unbounded ledger is written under one *term* after
another. A client that wants to write takes the ledger over:

    take_over      one compare-and-set: IN_RECOVERY, and the term is incremented to T. No other takeover has
                   T, not even one that finds the ledger IN_RECOVERY: two takeovers with the same term would
                   give different values to the same entries.
    fence, find,   as in the recovery of a bounded ledger, under T, in the last fragment; each entry found is
    write back     written back under *its own* content term, which it keeps for ever.
    TermOpening    one compare-and-set: OPEN, with a new fragment behind the end. Its content term is T.

An entry's identity is (content term, id). By the metadata every id has one content term, that of its
fragment. Only the holder of that term ever gave the entry a value. An entry that a former writer left on some
bookie behind the end found is therefore a different entry. The bookie answers a read of the later term with
"no such entry", and replaces the old entry when the new one arrives. Nothing has to be truncated.

Invariants: each takeover increments the term by one. Content terms never fall along the fragments. A takeover
that ends before its last step has changed nothing but fences, copies and the term.

Owns these changes to the metadata. Does not own how the end is found (`client_aio.core.recovery`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metadata.model.ledger import LedgerState

if TYPE_CHECKING:
    from metadata.model.ledger import Fragment, LedgerMetadata


def take_over(metadata: LedgerMetadata, least: int = 0) -> LedgerMetadata | None:
    """Return the metadata IN_RECOVERY under a new term, not below `least`; None if the ledger is sealed."""
    return None if metadata.is_closed else metadata.take_over(least)


@dataclass(frozen=True, slots=True)
class TermOpening:
    """The change to OPEN, with a new fragment under the term of a takeover.

    Attributes:
        known: the metadata that the takeover began with; their term is that of the takeover.
        fragments: the fragments of `known`, with the ensemble changes made in memory (rule 12d).
        last_entry: the last entry that the takeover found.
        length: payload bytes up to and including `last_entry`.
        bookies: the ensemble of the new fragment.
    """

    known: LedgerMetadata
    fragments: tuple[Fragment, ...]
    last_entry: int
    length: int
    bookies: tuple[str, ...]

    def apply(self, metadata: LedgerMetadata) -> LedgerMetadata | None:
        """Return the metadata to write in place of these; None if a later takeover has begun."""
        if metadata.state is not LedgerState.IN_RECOVERY or metadata.term != self.known.term:
            return None
        assert metadata.last_fragment == self.known.last_fragment
        # Earlier fragments may have been repaired, trimmed or moved to a page: the present ones are kept.
        fragments = (*metadata.fragments[:-1], *self.fragments[len(self.known.fragments) - 1 :])
        return metadata.open_term(self.last_entry + 1, self.bookies, length=self.length, fragments=fragments)

    def is_met_by(self, metadata: LedgerMetadata) -> bool:
        """Return whether metadata that refuse the change show that it has happened: the term is unique."""
        return metadata.state is LedgerState.OPEN and metadata.term == self.known.term
