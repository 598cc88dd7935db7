"""The pages of ledgers and of logs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from client_aio.dashboard.layout import (
    ROWS_PER_PAGE,
    Now,
    Page,
    badge,
    bookie_links,
    curve,
    facts,
    kind_of,
    ledger_link,
    nothing,
    options,
    pager,
    section,
    table,
)
from client_aio.dashboard.markup import (
    Html,
    bytes_text,
    duration_text,
    html,
    joined,
    link,
    range_text,
    rate_text,
    strip_widths,
)
from client_aio.dashboard.model import LEDGERS_KEPT, LedgerQuery
from client_aio.dashboard.vitals import ledgers_text

if TYPE_CHECKING:
    from client_aio.dashboard.model import ClusterModel, LedgerRow
    from client_aio.dashboard.observer import LedgerView, LogView
    from metadata.model.ledger import Fragment, LedgerMetadata
    from metadata.model.log import LogRow


# --- ledgers ------------------------------------------------------------------------------------------


def ledgers_page(model: ClusterModel, moment: Now, query: LedgerQuery) -> Page:
    """Return the page of ledgers: a search, and its results."""
    rows, count = model.select(query, ROWS_PER_PAGE)
    kept = "" if model.rows_kept < LEDGERS_KEPT else f"; the newest {LEDGERS_KEPT:,} are searched"
    found = table(
        ("Ledger", "State", "Name or log", "Entries", "Bytes", "Fragments", "Bookies", "Age"),
        [(str(row.ledger_id), _ledger_cells(model, row, moment)) for row in rows],
        f"{count:,} of {model.ledgers_listed:,} ledgers, newest first{kept}",
    )
    named = query.text.strip()
    empty = nothing("No ledger fits.")
    if not rows and named.isdecimal() and len(named) <= 19:
        empty = html(
            '<p class="nothing">No ledger fits. {}</p>', link("/ledger", f"Look up {named}", id=named)
        )
    return Page(
        "/ledgers",
        "Ledgers",
        {
            "search": _search(model, query),
            "ledgers": html("{}{}", found if rows else empty, pager("/ledgers", query, count)),
        },
    )


def _search(model: ClusterModel, query: LedgerQuery) -> Html:
    states = ("OPEN", "IN_RECOVERY", "CLOSED")
    return html(
        '<form class="search" action="/ledgers" role="search">'
        '<label>Id, name or log <input type="search" name="q" value="{}" autocomplete="off"></label>'
        '<label>State <select name="state"><option value="">any</option>{}</select></label>'
        '<label>Bookie <select name="bookie"><option value="">any</option>{}</select></label>'
        '<label class="check"><input type="checkbox" name="lacking" value="1"{}> Lacks copies</label>'
        "<button>Search</button></form>",
        query.text,
        options(states, query.state),
        options(list(model.bookies), query.bookie),
        Html(" checked" if query.lacking else ""),
    )


def ledger_state(state: str) -> Html:
    return badge({"OPEN": "open", "IN_RECOVERY": "warn"}.get(state, "plain"), state.lower().replace("_", " "))


def _ledger_cells(model: ClusterModel, row: LedgerRow, moment: Now) -> list[object]:
    names = row.layout.growing or (row.layout.complete[-1] if row.layout.complete else ())
    log = html("log {}", link("/log", row.log, name=row.log)) if row.log else ""
    return [
        ledger_link(row.ledger_id),
        html("{}{}", ledger_state(row.state), badge("bad", "loss") if row.has_loss else ""),
        html("{}{}", row.name, log),
        range_text(row.first_entry, row.last_entry),
        bytes_text(row.length),
        f"{row.fragments:,}",
        bookie_links(model, names),
        duration_text(moment.at - row.created_ms / 1000),
    ]


def ledger_page(model: ClusterModel, moment: Now, view: LedgerView) -> Page:
    """Return the page of one ledger: its fragments, drawn as a strip over the bookies."""
    heading = f"Ledger {view.ledger_id}"
    metadata = view.metadata
    if metadata is None:
        return Page("/ledgers", heading, {"ledger": nothing(view.error)})
    return Page(
        "/ledgers",
        heading,
        {
            "ledger": facts(_ledger_facts(view, metadata, moment)),
            "strip": section("Fragments over bookies", _strip(model, metadata, view.lac), "strip"),
            "fragments": section("Fragments", _fragment_table(model, metadata), "fragments"),
        },
    )


def _ledger_facts(view: LedgerView, metadata: LedgerMetadata, moment: Now) -> list[tuple[str, object]]:
    lac = "none" if view.lac is not None and view.lac < 0 else f"{view.lac:,}" if view.lac is not None else ""
    pairs: list[tuple[str, object]] = [
        ("State", ledger_state(metadata.state.value)),
        ("Quorums", f"E={metadata.ensemble_size} Qw={metadata.write_quorum} Qa={metadata.ack_quorum}"),
        ("Entries", range_text(metadata.first_entry, metadata.last_entry)),
        ("Last add confirmed", lac or f"not known: {view.lac_error}"),
        ("Bytes", bytes_text(metadata.length)),
        ("Digest", metadata.digest),
        ("Created", f"{duration_text(moment.at - metadata.created_ms / 1000)} ago"),
    ]
    if metadata.unbounded is not None:
        pairs.append(("Unbounded", f"{metadata.unbounded.name or 'no name'}, term {metadata.term:,}"))
    if metadata.log:
        pairs.append(("Log", link("/log", metadata.log, name=metadata.log)))
    if metadata.given_up is not None:
        pairs.append(
            ("Given up", f"closed with a loss; entries up to {metadata.given_up.lac:,} were acknowledged")
        )
    if metadata.absent:
        pairs.append(
            ("Absent", f"{sum(one.entries for one in metadata.absent):,} entries found on no bookie")
        )
    for key, value in list(metadata.custom.items())[:20]:
        pairs.append((f"Custom {key}", value[:200].decode(errors="replace")))
    return pairs


def _strip(model: ClusterModel, metadata: LedgerMetadata, lac: int | None) -> Html:
    """Draw a row for each bookie and a column for each fragment, as wide as its share of the entries."""
    fragments = metadata.fragments
    end = metadata.last_entry if metadata.is_closed else lac
    places = strip_widths(fragments, end)
    names = list(dict.fromkeys(name for fragment in fragments for name in fragment.bookies))
    rows = []
    for name in names:
        one = model.bookies.get(name)
        kind = "bad" if one is None or one.state in ("down", "silent") else kind_of(one)
        cells = [
            html(
                '<rect class="{} {}" x="{}" width="{}" height="20"><title>{}</title></rect>',
                kind,
                "odd" if index % 2 else "even",
                start,
                max(stop - start - 2, 1),
                f"fragment {index}",
            )
            for index, (fragment, (start, stop)) in enumerate(zip(fragments, places, strict=True))
            if name in fragment.bookies
        ]
        holds = [str(index) for index, fragment in enumerate(fragments) if name in fragment.bookies]
        rows.append(
            html(
                '<div class="lane" data-key="{}"><span class="name">{}</span><svg viewBox="0 0 1000 20" '
                'preserveAspectRatio="none" role="img" aria-label="{}">{}</svg></div>',
                name,
                bookie_links(model, (name,)),
                f"{name} holds fragments {', '.join(holds[:20])}{' and more' if len(holds) > 20 else ''}",
                joined(cells),
            )
        )
    before = len(metadata.rows) - len(fragments)
    note = f"{before:,} earlier fragments stand in pages. " if before else ""
    scale = f"from entry {fragments[0].first_entry:,} to {f'{end:,}' if end is not None else 'the end'}"
    growing = "" if metadata.is_closed else "; the last fragment grows"
    return html('<div class="strip">{}</div><p><small>{}{}{}</small></p>', joined(rows), note, scale, growing)


def _fragment_table(model: ClusterModel, metadata: LedgerMetadata) -> Html:
    fragments = metadata.fragments
    before = len(metadata.rows) - len(fragments)
    ends: list[int | None] = [one.first_entry - 1 for one in fragments[1:]]
    ends.append(metadata.last_entry)
    numbered = list(enumerate(zip(fragments, ends, strict=True)))[-ROWS_PER_PAGE:]

    def cells(index: int, fragment: Fragment, end: int | None) -> list[object]:
        return [
            f"{before + index:,}",
            range_text(fragment.first_entry, end),
            f"{fragment.content_term:,}",
            bookie_links(model, fragment.bookies),
        ]

    return table(
        ("Fragment", "Entries", "Term", "Bookies"),
        [(str(before + index), cells(index, fragment, end)) for index, (fragment, end) in reversed(numbered)],
        f"{len(numbered):,} of {len(metadata.rows):,} fragments, newest first",
    )


# --- logs ---------------------------------------------------------------------------------------------


def logs_page(model: ClusterModel, text: str, number: int) -> Page:
    """Return the page of all logs."""
    names = [name for name in model.logs if text.casefold() in name.casefold()]
    query = LedgerQuery(text, page=number)
    start = (max(number, 1) - 1) * ROWS_PER_PAGE
    body = html(
        '<ul class="names">{}</ul>',
        joined(
            html('<li data-key="{0}">{1}</li>', name, link("/log", name, name=name))
            for name in names[start : start + ROWS_PER_PAGE]
        ),
    )
    form = html(
        '<form class="search" action="/logs" role="search"><label>Name '
        '<input type="search" name="q" value="{}" autocomplete="off"></label>'
        "<button>Search</button></form><p>{:,} of {:,} logs</p>",
        text,
        len(names),
        len(model.logs),
    )
    return Page(
        "/logs",
        "Logs",
        {
            "search": form,
            "logs": html(
                "{}{}", body if names else nothing("No log fits."), pager("/logs", query, len(names))
            ),
        },
    )


def log_page(model: ClusterModel, moment: Now, view: LogView) -> Page:
    """Return the page of one log: its head, its followers, and its chain of ledgers."""
    heading = f"Log {view.name}"
    head = view.head
    if head is None:
        return Page("/logs", heading, {"log": nothing(view.error)})
    pages = len(head.rows.pages) + 1
    chain = table(
        ("Position", "Ledger", "State", "Entries", "Bytes", "Bookies", "Listed"),
        [(str(row.id), _chain_cells(model, row, moment)) for row in view.rows],
        f"page {view.page:,} of {pages:,}, newest first; {ledgers_text(len(head.rows))} in all",
    )
    steps = Html("")
    if pages > 1:
        steps = html(
            '<nav class="pager" aria-label="Pages of the chain">{}{}</nav>',
            link("/log", "← newer", name=view.name, page=view.page - 1) if view.page > 1 else "",
            link("/log", "older →", name=view.name, page=view.page + 1) if view.page < pages else "",
        )
    return Page(
        "/logs",
        heading,
        {
            "log": _log_head(view, moment),
            "followers": section("Followers", _followers(model, view), "followers"),
            "chain": section("Chain of ledgers", html("{}{}", chain, steps), "chain"),
        },
    )


def _log_head(view: LogView, moment: Now) -> Html:
    assert view.head is not None
    head, last = view.head, view.last
    pairs: list[tuple[str, object]] = [
        ("Begins at", str(head.begins_at)),
        ("Created", f"{duration_text(moment.at - head.created_ms / 1000)} ago"),
    ]
    if last is not None:
        if last.lac is not None:
            at = f"{last.ledger_id}:{last.lac}" if last.lac >= 0 else "no record yet"
        else:
            at = f"not known: {last.lac_error or last.error}"
        pairs.insert(0, ("Head", html("<strong>{}</strong>", at)))
        pairs.append(("Written to", ledger_link(last.ledger_id)))
    pairs += [(f"Query {one.query_id}", f"batch {one.batch_id:,}") for one in head.transactions[-10:]]
    growth = view.entries_per_s
    if growth is not None and growth.values:
        text = "–" if growth.last is None else rate_text(growth.last)
        pairs.append(("Grows by", curve(growth.values, text, "records per second")))
    return facts(pairs)


def _followers(model: ClusterModel, view: LogView) -> Html:
    metadata = view.last.metadata if view.last is not None else None
    if metadata is None:
        return nothing("No ledger is written to.")
    rows = []
    for name in metadata.last_fragment.bookies:
        one = model.bookies.get(name)
        figures = one.figures if one is not None else None
        watched = f"{figures.ledgers_watched:,}" if figures is not None else "–"
        polls = f"{figures.polls_waiting:,}" if figures is not None else "–"
        rows.append((name, [bookie_links(model, (name,)), watched, polls]))
    caption = "Bookies of the head. A bookie counts followers of all its ledgers together, not by log."
    return table(("Bookie", "Ledgers watched", "Long polls"), rows, caption)


def _chain_cells(model: ClusterModel, row: LogRow, moment: Now) -> list[object]:
    ledger = model.row(row.ledger_id)
    listed = f"{duration_text(moment.at - row.created_ms / 1000)} ago"
    position = f"{row.id}:0"
    if ledger is None:
        return [position, ledger_link(row.ledger_id), badge("plain", "not read yet"), "–", "–", "–", listed]
    names = ledger.layout.growing or (ledger.layout.complete[-1] if ledger.layout.complete else ())
    return [
        position,
        ledger_link(row.ledger_id),
        ledger_state(ledger.state),
        range_text(ledger.first_entry, ledger.last_entry),
        bytes_text(ledger.length),
        bookie_links(model, names),
        listed,
    ]
