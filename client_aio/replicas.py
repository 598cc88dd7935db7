"""What the bookies of a ledger hold of it, by their own word. Never fences.

Owns the asking and the comparison with what is owed. A listing may name entries whose bytes have rotted:
only reading them tells. What a bookie knows to have lost (rule 4) it says here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bookie_aio.wire.listing import Row, parse_rows
from bookie_aio.wire.messages import ListEntries, ListEntriesAnswer
from client_aio.core.repair import Part, owed, split
from metadata.errors import BookKeeperError
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from client_aio.connection import BookieConnection
    from client_aio.context import ClientContext
    from metadata.ledger import LedgerMetadata

_RANGE_ENTRIES = 1_000_000


@dataclass(frozen=True, slots=True)
class Replica:
    """One bookie's part of one fragment."""

    bookie_id: str
    first_entry: int
    """Of the fragment."""
    entries_owed: int | None
    """How many entries it is to hold; None in the last fragment of a ledger that is not CLOSED."""
    entries_missing: int | None
    """How many of them it does not list; None where that is not known."""
    is_damaged: bool
    """Whether it lost data of this ledger: what it does not hold, it may have held."""
    error: str
    """Why it could not be asked; empty when it answered."""


async def list_entries(
    connection: BookieConnection, ledger_id: int, first: int, last: int, timeout_s: float
) -> tuple[list[Row], bool]:
    """Ask a bookie which entries from `first` to `last` it holds, and whether it lost any of the ledger."""
    rows: list[Row] = []
    following, is_damaged = first, False
    while 0 <= following <= last:
        answer, body = await connection.call(
            ListEntries(ledger_id, following), ListEntriesAnswer, timeout_s=timeout_s, ledger_id=ledger_id
        )
        rows += parse_rows(body)
        following, is_damaged = answer.next_entry, answer.is_damaged
    return rows, is_damaged


async def list_replicas(context: ClientContext, ledger_id: int) -> list[Replica]:
    """Ask every bookie named by the ledger's metadata; see `Client.ledger_replicas`."""
    metadata, _ = await context.ledgers.read(ledger_id)
    names = sorted({name for fragment in metadata.fragments for name in fragment.bookies})

    async def ask(bookie_id: str) -> tuple[list[Row], bool]:
        connection = await context.pool.get(bookie_id)
        return await list_entries(connection, ledger_id, 0, ENTRY_ID_MAX, context.config.read_timeout_s)

    answers = await asyncio.gather(*map(ask, names), return_exceptions=True)
    replicas: list[Replica] = []
    for part, is_complete in _parts(metadata):
        for bookie_id in part.bookies:
            answer = answers[names.index(bookie_id)]
            if isinstance(answer, BookKeeperError):
                rows, is_damaged, error = None, False, str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                rows, is_damaged, error = answer[0], answer[1], ""
            owing = missing = None
            if is_complete:
                owing, missing = _compare(metadata, part, bookie_id, rows)
            replicas.append(Replica(bookie_id, part.first_entry, owing, missing, is_damaged, error))
    return replicas


def _parts(metadata: LedgerMetadata) -> list[tuple[Part, bool]]:
    """Give each fragment as a part, and whether its entries are known."""
    starts = [fragment.first_entry for fragment in metadata.fragments]
    ends = [start - 1 for start in starts[1:]] + [metadata.last_entry]
    return [
        (
            Part(
                fragment.first_entry,
                fragment.first_entry - 1 if end is None else end,
                fragment.content_term,
                fragment.bookies,
            ),
            end is not None,
        )
        for fragment, end in zip(metadata.fragments, ends, strict=True)
    ]


def _compare(
    metadata: LedgerMetadata, part: Part, bookie_id: str, rows: list[Row] | None
) -> tuple[int, int | None]:
    owing = missing = 0
    for wanted in owed(metadata, part, bookie_id, _RANGE_ENTRIES):
        owing += wanted.entries
        if rows is not None:
            missing += sum(run.entries for run in split(wanted, rows)[0])
    return owing, None if rows is None else missing
