"""Older metadata: what becomes of a ledger while the metadata store is an older copy.

A ledger is *of before* where its metadata are not those of the copy. The store has its older metadata then,
or none. Clients that go by the older ones may recover it, close it and read it. The names are those of the
invariants of bounded ledgers:

- NoDivergenceBetweenClientAndMetaData: it is not closed before an entry that was acknowledged or read, or
  that the newest metadata have within its end. Nothing is acknowledged beyond an end that it comes to have.
- NoLogDivergence, TypeOK: its end and its length are those of entries that its writer issued.
- AllAckedEntriesAreReadable: once faults stop, it can be closed, and all entries up to there are read.

These are excused, since nothing that a client can ask for shows what was:

- A ledger that the copy lacks. Its entries are asked for if the newest metadata come back.
- A ledger that was deleted. The copy may have it, and its bookies have dropped it.
- A ledger that was closed before any bookie had told of the set-back. Its end may be too low.
- A ledger that cannot be closed because bookies say that they lost data of it. The newest metadata let them
  evict it, and the older ones name them again. They deny nothing then (rule 4).
- Where the newest metadata come back: entries that were never acknowledged, and that were read only because
  a recovery by older metadata kept them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metadata.errors import MetadataCorruptError
from metadata.model.ledger import LedgerMetadata, LedgerState

if TYPE_CHECKING:
    from tests.sim.checkers.invariants import History, LedgerRecord


def begin(record: LedgerRecord, value: bytes | None) -> None:
    """Note that a ledger is of before, and what the copy has of it."""
    record.is_of_before = True
    record.older = None if value is None else LedgerMetadata.from_json(value)


def end(record: LedgerRecord) -> None:
    """Note that the newest metadata are back. Nothing was promised by the older ones."""
    newest = -1 if record.closed_last is None else record.closed_last
    record.is_of_before = record.is_excused = False
    record.older = None
    record.read_up_to = min(record.read_up_to, max(record.acked, newest))


def changed(history: History, record: LedgerRecord, value: bytes | None) -> None:
    """Note a change of the older metadata, when it takes effect."""
    before = record.older
    if value is None:
        record.older = None
        return
    try:
        metadata = LedgerMetadata.from_json(value)
    except MetadataCorruptError as error:
        history.fail("TypeOK", str(error))
        return
    if record.is_excused or record.ledger_id in history.ignored or metadata.is_unbounded:
        record.older = metadata
        if metadata.state is LedgerState.OPEN:
            record.open_metadata = metadata  # its writer goes on all the same
        return
    history.note("meta", "older metadata of ledger", record.ledger_id, metadata)
    is_closing = metadata.is_closed and (before is None or not before.is_closed)
    if is_closing:
        _check_end(history, record, metadata)
    record.older = metadata
    if metadata.state is LedgerState.OPEN:
        record.open_metadata = metadata  # its writer has changed it: nobody else does
    else:
        record.is_fenced_by_older = True


def _check_end(history: History, record: LedgerRecord, metadata: LedgerMetadata) -> None:
    ledger_id, last, needed = record.ledger_id, metadata.last_entry, record.needed
    assert last is not None
    history.settle("writer")
    needed = record.needed
    if last < needed and not history.is_set_back_told:
        history.note("checker", "excuses ledger", ledger_id, f"closed at {last} of {needed}, told by nobody")
        history.counts["closed_before_told"] += 1
        record.is_excused = True
        return
    history.counts["closed_by_older_metadata"] += 1
    history.require(
        last >= needed,
        "NoDivergenceBetweenClientAndMetaData",
        lambda: (
            f"ledger {ledger_id} was closed at {last}, by older metadata; entries up to {needed} were "
            f"acknowledged, read, or within its end. The newest metadata: {record.metadata}"
        ),
    )
    history.require(
        last < min(len(record.issued), record.not_done),
        "NoLogDivergence",
        lambda: f"ledger {ledger_id} was closed at {last}; its writer issued {len(record.issued)} entries",
    )
    length = sum(map(len, record.issued[: last + 1]))
    history.require(
        metadata.length == length,
        "TypeOK",
        lambda: f"ledger {ledger_id} was closed with length {metadata.length}; it is {length}",
    )


def cannot_be_closed(history: History, record: LedgerRecord, dishonest: str) -> bool:
    """Return whether a ledger of before is excused from being closed, after attempts that failed.

    The marks of the bookie whose medium lies, `dishonest`, are no excuse: the others are enough without it.
    """
    if not record.is_of_before or not history.words.is_doubted_by_others(record.ledger_id, dishonest):
        return False
    history.note("checker", "excuses ledger", record.ledger_id, "bookies were made to forget it")
    history.counts["forgotten_for_older_metadata"] += 1
    record.is_excused = True
    return True
