"""The text form of a log's chain of ledgers. Pure: values in, text out."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bookie_aio.structured_logging import escape
from client_aio.log.takeover import LogMetadata
from metadata.model.ledger import LedgerMetadata
from metadata.model.log import LogRow


def row_of(name: str, metadata: LogMetadata) -> dict[str, Any]:
    """Return the row of `log list`."""
    return {
        "log": name,
        "ledgers": len(metadata.rows),
        "begins_at": str(metadata.begins_at),
        "last_ledger": metadata.rows[-1].id if metadata.rows else None,
        "created": _time(metadata.created_ms),
    }


def link_of(row: LogRow, ledger: LedgerMetadata | None) -> dict[str, Any]:
    """Return the row of `log show` for one ledger; `ledger` is None where it does not exist."""
    return {
        "id": row.id,
        "ledger_id": row.ledger_id,
        "state": "GONE" if ledger is None else ledger.state.value,
        "entries": None if ledger is None or ledger.last_entry is None else ledger.last_entry + 1,
        "bytes": None if ledger is None else ledger.length,
        "ensembles": [] if ledger is None else [list(fragment.bookies) for fragment in ledger.fragments],
        "listed": _time(row.created_ms),
    }


def draw(metadata: LogMetadata, links: Sequence[dict[str, Any]]) -> str:
    """Draw the chain, a line for each ledger, oldest first.

        log orders  3 ledgers, begins at 7:0
        custom app = b'demo'

             id  state   entries      bytes  ensembles           listed
        ┬     7  CLOSED    1,000  1,000,000  b1 b2 b3 → b1 b4 b3  2026-01-01T00:00:00+00:00
        ├     8  CLOSED    1,000  1,000,000  b1 b2 b3            …
        └     9  OPEN          …          …  b2 b3 b4            …

    A ledger that was added under another id than its own is written `id=ledger`. Where only the last links
    are given, the omitted ones are counted.
    """
    count = len(metadata.rows)
    lines = [
        f"log {metadata.name}  {count:,} {'ledger' if count == 1 else 'ledgers'}, "
        f"begins at {metadata.begins_at}"
    ]
    lines += [f"custom {escape(key)} = {value!r}" for key, value in metadata.custom.items()]
    lines += [f"query {escape(query)}: batch {batch}" for query, batch in metadata.transactions.items()]
    if not links:
        return "\n".join(lines)
    cells: list[tuple[str, ...]] = [("", "id", "state", "entries", "bytes", "ensembles", "listed")]
    left_out = count - len(links)
    for index, link in enumerate(links):
        is_first, is_last = index == 0 and not left_out, index == len(links) - 1
        mark = "─" if is_first and is_last else "┬" if is_first else "└" if is_last else "├"
        cells.append((mark, *_cells_of(link)))
    widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
    lines.append("")
    for index, row in enumerate(cells):
        if index == 1 and left_out:
            lines.append(f"┬  … {left_out:,} more, --ledgers shows them")
        mark, name, state, entries, size, ensembles, listed = (
            f"{cell:>{width}}" if place in (1, 3, 4) else f"{cell:<{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((mark, name, state, entries, size, ensembles, listed)).rstrip())
    return "\n".join(lines)


def _cells_of(link: dict[str, Any]) -> tuple[str, ...]:
    name = str(link["id"]) if link["id"] == link["ledger_id"] else f"{link['id']}={link['ledger_id']}"
    return (
        name,
        link["state"],
        "…" if link["entries"] is None else f"{link['entries']:,}",
        "…" if link["bytes"] is None else f"{link['bytes']:,}",
        " → ".join(" ".join(bookies) for bookies in link["ensembles"]),
        link["listed"],
    )


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
