"""Terms: how an unbounded ledger goes from one writer to the next.

The theory. A bounded ledger has one writer and an end. An unbounded one is written under one *term* after
another, and whoever wants to write takes it over:

    take_over      one compare-and-set: IN_RECOVERY, and the term counts up to T. Nobody else ever has T, also
                   nobody who finds the ledger IN_RECOVERY: two takeovers that shared a term would give values
                   to the same entries.
    fence, find,   as in the recovery of a bounded ledger, under T, in the last fragment; what is found is
    write back     written back under *its own* content term, which it keeps for ever.
    TermOpening    one compare-and-set: OPEN, with a new fragment behind the end. Its content term is T.

An entry's identity is (content term, id). By the metadata every id has one content term, that of its
fragment, and only the holder of that term ever gave it values. So what a former writer left on some bookie
behind the end that was found is another entry: a bookie answers a read of the later term with "no such
entry", and replaces it when the entry of the later term comes. Nothing has to be truncated.

Invariants: terms grow by one at each takeover; content terms never fall along the fragments; a takeover that
ends before its last step has changed nothing but fences, copies and the term.

Owns these changes to the metadata. Does not own how the end is found (`client_aio.core.recovery`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metadata.model.ledger import LedgerState

if TYPE_CHECKING:
    from metadata.model.ledger import Fragment, LedgerMetadata


def take_over(metadata: LedgerMetadata) -> LedgerMetadata | None:
    """Return the ledger IN_RECOVERY under a term of one's own; None where it is sealed."""
    return None if metadata.is_closed else metadata.take_over()


@dataclass(frozen=True, slots=True)
class TermOpening:
    """The change to OPEN, with a new fragment under the term of a takeover.

    Attributes:
        known: the metadata that the takeover began with: they have its term.
        fragments: those, with the ensemble changes that it made in memory (rule 12d).
        last_entry: the end that it found.
        length: payload bytes up to there.
        bookies: of the new fragment.
    """

    known: LedgerMetadata
    fragments: tuple[Fragment, ...]
    last_entry: int
    length: int
    bookies: tuple[str, ...]

    def apply(self, metadata: LedgerMetadata) -> LedgerMetadata | None:
        """Return what to write in place of these metadata; None where another takeover came later."""
        if metadata.state is not LedgerState.IN_RECOVERY or metadata.term != self.known.term:
            return None
        assert metadata.last_fragment == self.known.last_fragment
        # Earlier fragments may have been repaired, trimmed or moved to a page: they are taken as they are.
        fragments = (*metadata.fragments[:-1], *self.fragments[len(self.known.fragments) - 1 :])
        return metadata.open_term(self.last_entry + 1, self.bookies, length=self.length, fragments=fragments)

    def is_met_by(self, metadata: LedgerMetadata) -> bool:
        """Return whether it has happened, by metadata that refuse it: nobody else opens under this term."""
        return metadata.state is LedgerState.OPEN and metadata.term == self.known.term
