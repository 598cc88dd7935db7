"""The frame of every page, and the parts that pages are made of. Pure.

A page is a list of *regions*, each with an id. The server sends the whole page once, and then each region
whose markup has changed. So a region is the unit of a live update, and a page is complete without a script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from client_aio.core.audit import Condition
from client_aio.dashboard.markup import (
    Html,
    clock_text,
    html,
    joined,
    link,
    sparkline,
    url,
)
from client_aio.dashboard.vitals import SERIES_POINTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from client_aio.dashboard.model import ClusterModel, LedgerQuery
    from client_aio.dashboard.vitals import BookieState

ROWS_PER_PAGE = 50
WORDS = {Condition.HEALTHY: "ok", Condition.DEGRADED: "warn", Condition.AT_RISK: "bad"}
SIGNS = {"ok": "✓", "warn": "!", "bad": "✕", "unknown": "?"}
STATE_KINDS = {"writable": "ok", "read-only": "warn", "silent": "bad", "down": "bad"}
_PAGES = (
    ("/", "Overview"),
    ("/bookies", "Bookies"),
    ("/ledgers", "Ledgers"),
    ("/logs", "Logs"),
    ("/repair", "Repair"),
    ("/events", "Events"),
)


class Now(NamedTuple):
    """The moment that a page is made for."""

    now: float
    """The observer's monotonic time, in seconds."""
    at: float
    """The wall clock, in seconds since the epoch."""


class Page(NamedTuple):
    """One page."""

    path: str
    title: str
    regions: dict[str, Html]


def document(page: Page, model: ClusterModel, moment: Now, uri: str, live: str) -> Html:
    """Return the whole page.

    Args:
        uri: the metadata store, for the foot of the page.
        live: the address of the page's live updates.
    """
    kind, word = verdict(model)
    return html(
        "<!doctype html>\n"
        '<html lang="en" data-kind="{kind}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>{title}</title>'
        '<link rel="icon" href="/static/icon.svg"><link rel="stylesheet" href="/static/page.css">'
        '<script type="module" src="/static/page.js"></script>'
        '<noscript><meta http-equiv="refresh" content="5"></noscript></head>'
        '<body data-live="{live}"><a class="skip" href="#main">Skip to content</a>'
        '<header><a class="brand" href="/">bookie-aio</a><nav aria-label="Pages"><ul>{nav}</ul></nav>'
        '<div id="live-verdict" data-region>{pill}</div></header>'
        '<p id="connection" role="status"></p>'
        '<main id="main" tabindex="-1"><h1>{heading}</h1>{regions}</main>'
        '<footer><p>{uri}</p><div id="live-foot" data-region>{foot}</div></footer></body></html>\n',
        kind=kind,
        title=title(page, model),
        live=live,
        nav=_nav(page.path),
        pill=_pill(kind, word),
        heading=page.title,
        regions=joined(
            html('<div id="{}" class="region" data-region>{}</div>', name, body)
            for name, body in page.regions.items()
        ),
        uri=uri,
        foot=foot(model, moment),
    )


def frame(page: Page, model: ClusterModel, moment: Now) -> dict[str, Html]:
    """Return all that a live update may change, by the element's id."""
    kind, word = verdict(model)
    return {**page.regions, "live-verdict": _pill(kind, word), "live-foot": foot(model, moment)}


def title(page: Page, model: ClusterModel) -> str:
    """Return the title of the browser's window."""
    kind, word = verdict(model)
    return f"{SIGNS[kind]} {word} · {page.title} · bookie-aio"


def verdict(model: ClusterModel) -> tuple[str, str]:
    """Return the condition of the cluster, as a class and as a word."""
    if not model.is_known and model.condition < Condition.AT_RISK:
        return "unknown", "not known" if model.metadata_error else "reading"
    condition = model.condition
    return WORDS[condition], condition.label


def foot(model: ClusterModel, moment: Now) -> Html:
    """Return the foot of the page: how old it is."""
    if model.metadata_at is None:
        return html("<p>The metadata store has not answered yet.</p>")
    return html("<p>Metadata as of {} UTC. This page changes nothing.</p>", clock_text(model.metadata_at))


def _nav(path: str) -> Html:
    return joined(
        html(
            '<li><a href="{}"{}>{}</a></li>',
            target,
            Html(' aria-current="page"' if target == path else ""),
            name,
        )
        for target, name in _PAGES
    )


def _pill(kind: str, word: str) -> Html:
    return html(
        '<a class="pill {}" href="/"><span aria-hidden="true">{}</span> {}</a>', kind, SIGNS[kind], word
    )


def badge(kind: str, text: str) -> Html:
    return html('<span class="badge {}">{}</span>', kind, text)


def section(heading: str, body: Html, name: str) -> Html:
    return html('<section aria-labelledby="h-{0}"><h2 id="h-{0}">{1}</h2>{2}</section>', name, heading, body)


def table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[object]]], caption: str) -> Html:
    """Return a table. On a narrow screen each row becomes a card, so cells repeat the head of their column.

    Args:
        rows: each with a key, by which a live update finds the row again, and its cells.
    """
    head = joined(html('<th role="columnheader" scope="col">{}</th>', one) for one in heads)
    body = joined(
        html(
            '<tr role="row" data-key="{}">{}</tr>',
            key,
            joined(
                html('<td role="cell" data-label="{}"{}><div>{}</div></td>', name, _emptiness(cell), cell)
                for name, cell in zip(heads, cells, strict=True)
            ),
        )
        for key, cells in rows
    )
    return html(
        '<table role="table"><caption>{}</caption><thead role="rowgroup"><tr role="row">{}</tr></thead>'
        '<tbody role="rowgroup">{}</tbody></table>',
        caption,
        head,
        body,
    )


def _emptiness(cell: object) -> Html:
    return Html("") if str(cell) else Html(' class="empty"')


def nothing(text: str) -> Html:
    return html('<p class="nothing">{}</p>', text)


def ledger_link(ledger_id: int) -> Html:
    return link("/ledger", ledger_id, id=ledger_id)


def bookie_links(model: ClusterModel, names: Sequence[str]) -> Html:
    """Return the names of bookies, those that are down marked."""
    parts = []
    for name in names:
        one = model.bookies.get(name)
        is_bad = one is None or one.state in ("down", "silent")
        mark = Html(' <span class="badge bad">down</span>') if is_bad else Html("")
        parts.append(html('<span class="name">{}{}</span>', link("/bookies", name, bookie=name), mark))
    return joined(parts, " ")


def tile(name: str, value: object, note: object = "") -> Html:
    return html('<div class="tile"><dt>{}</dt><dd><strong>{}</strong> {}</dd></div>', name, value, note)


def kind_of(one: BookieState) -> str:
    if one.state == "read-only" and one.order is not None:
        return "warn"
    kind = STATE_KINDS[one.state]
    return "warn" if kind == "ok" and one.condition else kind


def curve(values: Sequence[float | None], text: str, label: str) -> Html:
    return html(
        '<span class="curve">{}<small>{}</small></span>', sparkline(values, label, SERIES_POINTS), text
    )


def facts(pairs: Sequence[tuple[str, object]]) -> Html:
    return html(
        '<dl class="facts">{}</dl>',
        joined(html("<div><dt>{}</dt><dd>{}</dd></div>", name, value) for name, value in pairs),
    )


def options(values: Sequence[str], chosen: str) -> Html:
    if chosen and chosen not in values:
        values = [*values, chosen]
    return joined(
        html("<option{}>{}</option>", Html(" selected" if value == chosen else ""), value) for value in values
    )


def pager(path: str, query: LedgerQuery, count: int) -> Html:
    pages = max(1, -(-count // ROWS_PER_PAGE))
    if pages == 1:
        return Html("")
    at = min(max(query.page, 1), pages)
    terms = {
        "q": query.text,
        "state": query.state,
        "bookie": query.bookie,
        "lacking": int(query.lacking) or "",
    }

    def step(to: int, name: str, rel: str) -> Html:
        if not 1 <= to <= pages:
            return html('<span class="off">{}</span>', name)
        return html('<a rel="{}" href="{}">{}</a>', rel, url(path, **terms, page=to), name)

    return html(
        '<nav class="pager" aria-label="Pages of the list">{}<span>page {:,} of {:,}</span>{}</nav>',
        step(at - 1, "← newer", "prev"),
        at,
        pages,
        step(at + 1, "older →", "next"),
    )
