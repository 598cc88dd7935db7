"""What the bookies of a ledger hold of it, by their own word. Never fences.

Owns the asking and the comparison with what is owed. A listing may name entries whose bytes have rotted:
only reading them tells. What a bookie knows to have lost (rule 4) it says here.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bookie_aio.wire.listing import Row, parse_rows
from bookie_aio.wire.messages import ListEntries, ListEntriesAnswer
from client_aio.core.repair import Part, complete_parts, owed, split
from client_aio.unbounded.fragments import spans
from metadata.errors import BookKeeperError, ProtocolError
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from client_aio.connection import BookieConnection
    from client_aio.context import ClientContext
    from client_aio.unbounded.fragments import Span
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
        if 0 <= answer.next_entry <= following:
            raise ProtocolError(
                f"a list of entries from {following} on is said to go on at {answer.next_entry}",
                ledger_id=ledger_id,
            )
        following, is_damaged = answer.next_entry, answer.is_damaged
    return rows, is_damaged


async def list_replicas(context: ClientContext, ledger_id: int) -> list[Replica]:
    """Ask every bookie named by the ledger's metadata; see `Client.ledger_replicas`.

    Page after page where an unbounded ledger has them: no more than one page's listings are held at a time.
    """
    metadata, _ = await context.ledgers.read(ledger_id)
    replicas: list[Replica] = []
    unreachable: dict[str, str] = {}
    async with aclosing(spans(context, metadata)) as found:
        async for span in found:
            replicas += await _replicas_of(context, span, unreachable)
    if metadata.is_unbounded:
        # Bookies drop what is trimmed: that is not missing.
        metadata, _ = await context.ledgers.read(ledger_id, sync=True)
        replicas = [each for each in replicas if each.first_entry >= metadata.first_entry]
    return replicas


async def _replicas_of(context: ClientContext, span: Span, unreachable: dict[str, str]) -> list[Replica]:
    """Ask about some fragments.

    Args:
        unreachable: who could not be asked before, and why; those are not asked again.
    """
    ledger_id, fragments = span.metadata.ledger_id, span.fragments
    names = sorted({name for fragment in fragments for name in fragment.bookies})
    last = ENTRY_ID_MAX if span.last_entry is None else max(span.last_entry, fragments[0].first_entry)

    async def ask(bookie_id: str) -> tuple[list[Row], bool]:
        if bookie_id not in unreachable:
            try:
                connection = await context.pool.get(bookie_id)
                return await list_entries(
                    connection, ledger_id, fragments[0].first_entry, last, context.config.read_timeout_s
                )
            except BookKeeperError as error:
                unreachable[bookie_id] = str(error)
        return [], False

    answers = dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))
    parts = {part.first_entry: part for part in complete_parts(fragments, span.last_entry)}
    replicas: list[Replica] = []
    for fragment in fragments:
        part = parts.get(fragment.first_entry)
        for bookie_id in fragment.bookies:
            rows, is_damaged = answers[bookie_id]
            error = unreachable.get(bookie_id, "")
            owing = missing = None
            if part is not None:
                owing, missing = _compare(span.metadata, part, bookie_id, None if error else rows)
            replicas.append(Replica(bookie_id, fragment.first_entry, owing, missing, is_damaged, error))
    return replicas


def _compare(
    metadata: LedgerMetadata, part: Part, bookie_id: str, rows: list[Row] | None
) -> tuple[int, int | None]:
    owing = missing = 0
    for wanted in owed(metadata, part, bookie_id, _RANGE_ENTRIES):
        owing += wanted.entries
        if rows is not None:
            missing += sum(run.entries for run in split(wanted, rows)[0])
    return owing, None if rows is None else missing
