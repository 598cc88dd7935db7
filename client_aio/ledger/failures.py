"""How the failure of a writer reaches those who wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metadata.errors import LedgerFencedError, Outcome

if TYPE_CHECKING:
    from metadata.errors import BookKeeperError
    from metadata.model.ledger import LedgerMetadata


def with_message(error: BookKeeperError, message: str, entry_id: int) -> BookKeeperError:
    """Build an error of the same class with another message."""
    copy = type(error)(message, ledger_id=error.ledger_id, bookie_id=error.bookie_id)
    copy.entry_id = entry_id
    copy.outcome = error.outcome
    return copy


def as_unknown(error: BookKeeperError) -> BookKeeperError:
    """Give the error as one of those that it ends: some bookies may have their entries (rule 8).

    What was *not done* may have been an ensemble change; the adds that waited for it had been sent.
    """
    if error.outcome is not Outcome.UNKNOWN:
        error.outcome = Outcome.UNKNOWN
    return error


def taken_over(metadata: LedgerMetadata) -> LedgerFencedError:
    """Build the error of a writer that the metadata show to be displaced."""
    end = f" at entry {metadata.last_entry}" if metadata.is_closed else ""
    term = f" under term {metadata.term}" if metadata.is_unbounded and not metadata.is_closed else ""
    return LedgerFencedError(
        f"ledger {metadata.ledger_id} has been taken over by another client: it is "
        f"{metadata.state.value}{end}{term}",
        ledger_id=metadata.ledger_id,
    )


def displaced(ledger_id: int, refusal: BookKeeperError) -> LedgerFencedError:
    """Build the error of a client whose term a bookie refuses."""
    return LedgerFencedError(
        f"ledger {ledger_id} has been taken over by another client ({refusal})",
        ledger_id=ledger_id,
        bookie_id=refusal.bookie_id,
    )
