"""The pages of the cluster: overview, bookies, repair, events. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from client_aio.dashboard.layout import (
    ROWS_PER_PAGE,
    SIGNS,
    WORDS,
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
    tile,
    verdict,
)
from client_aio.dashboard.markup import (
    Html,
    bar,
    bytes_text,
    clock_text,
    duration_text,
    html,
    joined,
    link,
    rate_text,
    seconds_text,
    sparkline,
    url,
)
from client_aio.dashboard.model import LedgerQuery
from client_aio.dashboard.vitals import (
    EVENT_KINDS,
    EVENTS_KEPT,
    SERIES_POINTS,
    ledgers_text,
    text_of_event,
    total_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from client_aio.dashboard.model import ClusterModel, LackingRow
    from client_aio.dashboard.vitals import BookieState, Event


# --- overview -----------------------------------------------------------------------------------------


def overview(model: ClusterModel, moment: Now) -> Page:
    """Return the first page: healthy or not, why, and what happened."""
    return Page(
        "/",
        "Overview",
        {
            "banner": _banner(model),
            "tiles": _tiles(model),
            "repair-now": _repair_progress(model, moment),
            "bookie-tiles": section("Bookies", _bookie_tiles(model), "bookies"),
            "events-now": section(
                "Latest events",
                _event_list(model.events.newest(8), "Nothing has happened since this page runs."),
                "events",
            ),
        },
    )


def _banner(model: ClusterModel) -> Html:
    kind, word = verdict(model)
    sentence = {
        "ok": "Every ledger has all its copies on bookies that run.",
        "warn": "No data is lost. Another failure may be too much.",
        "bad": "Some entry has one good copy at most, or none.",
        "unknown": "The condition of the cluster is not known.",
    }[kind]
    problems = [
        html(
            '<li class="{}"><span class="sign" aria-hidden="true">{}</span> <span>{}</span></li>',
            WORDS[one.condition] if one.condition else "note",
            SIGNS[WORDS[one.condition]] if one.condition else "·",
            one.text,
        )
        for one in model.problems[:12]
    ]
    if len(model.problems) > 12:
        problems.append(html('<li class="note">and {:,} more</li>', len(model.problems) - 12))
    return html(
        '<section class="banner {}" aria-label="Condition"><p class="verdict"><span class="sign" '
        'aria-hidden="true">{}</span> <strong>{}</strong></p><p>{}</p>{}</section>',
        kind,
        SIGNS[kind],
        word.capitalize(),
        sentence,
        html('<ul class="problems">{}</ul>', joined(problems)) if problems else "",
    )


def _tiles(model: ClusterModel) -> Html:
    bookies = list(model.bookies.values())
    up = sum(one.state not in ("down", "silent") for one in bookies)
    states = ", ".join(f"{count:,} {state}" for state, count in model.ledgers_by_state.items())
    entries, written = total_of(bookies, "entries_per_s"), total_of(bookies, "bytes_per_s")
    slowest = max((one.latency_s.last or 0.0 for one in bookies if not one.away_since), default=0.0)
    return html(
        '<dl class="tiles">{}</dl>',
        joined(
            [
                tile("Bookies up", f"{up:,} of {len(bookies):,}"),
                tile("Ledgers", f"{model.ledgers_listed:,}", html("<small>{}</small>", states)),
                tile("Lacking copies", f"{len(model.lacking()):,}", html("<small>ledgers</small>")),
                tile(
                    "Adds at bookies",
                    rate_text(_last(entries)),
                    sparkline(entries, "adds per second over two minutes", SERIES_POINTS),
                ),
                tile(
                    "Written",
                    f"{bytes_text(_last(written))}/s" if _last(written) is not None else "–",
                    sparkline(written, "bytes written per second over two minutes", SERIES_POINTS),
                ),
                tile("Slowest bookie", seconds_text(slowest or None), Html("<small>latency of adds</small>")),
                _fullest_disk(bookies),
            ]
        ),
    )  # fmt: skip


def _fullest_disk(bookies: Sequence[BookieState]) -> Html:
    used = [
        (1 - one.figures.disk_free / one.figures.disk_total, one.bookie_id, one.figures.disk_free)
        for one in bookies
        if one.figures is not None and one.figures.disk_total and one.record is not None
    ]
    if not used:
        return tile("Fullest disk", "–")
    share, name, free = max(used)
    return tile("Fullest disk", f"{share:.0%}", html("<small>{} free at {}</small>", bytes_text(free), name))


def _last(values: Sequence[float | None]) -> float | None:
    return values[-1] if values else None


def _bookie_tiles(model: ClusterModel) -> Html:
    if not model.bookies:
        return nothing("No bookie is known.")
    return html(
        '<ul class="bookies">{}</ul>',
        joined(
            html(
                '<li data-key="{0}"><a class="{1}" href="{2}">'
                '<span class="sign" aria-hidden="true">{3}</span>'
                " <strong>{0}</strong> <small>{4}</small></a></li>",
                one.bookie_id,
                kind_of(one),
                url("/bookies", bookie=one.bookie_id),
                SIGNS[kind_of(one)],
                one.state if one.order is None else one.order.mode,
            )
            for one in model.bookies.values()
        ),
    )


# --- bookies ------------------------------------------------------------------------------------------


def bookies_page(model: ClusterModel, moment: Now, bookie_id: str) -> Page:
    """Return the page of all bookies, or of one."""
    if not bookie_id:
        rows = [(one.bookie_id, _bookie_cells(one, moment)) for one in model.bookies.values()]
        latency = (
            "latency of adds is their 99th percentile where a bookie has --http, else the mean of commits"
        )
        body = table(
            ("Bookie", "State", "Disk", "Adds", "Latency", "Reads", "Holds ledgers"),
            rows,
            f"{len(rows):,} bookies; curves of two minutes; {latency}",
        )
        return Page("/bookies", "Bookies", {"bookies": body if rows else nothing("No bookie is known.")})
    one = model.bookies.get(bookie_id)
    if one is None:
        return Page("/bookies", "Bookie", {"bookie": nothing(f"There is no bookie {bookie_id}.")})
    return Page(
        "/bookies",
        f"Bookie {bookie_id}",
        {
            "bookie": _bookie_detail(one, moment, len(model.index.ledgers_of(bookie_id))),
            "curves": section("Last two minutes", _bookie_curves(one), "curves"),
            "bookie-events": section(
                "Events",
                _event_list(
                    [event for event in model.events.newest(EVENTS_KEPT) if event.subject == bookie_id][:20],
                    "Nothing has happened to it since this page runs.",
                ),
                "bookie-events",
            ),
        },
    )


def _state_of(one: BookieState, moment: Now) -> Html:
    text = one.state if one.order is None or one.state in ("down", "silent") else one.order.mode
    text = {"silent": "no answer"}.get(text, text)
    away = "" if one.away_since is None else f" for {duration_text(moment.now - one.away_since)}"
    tight = badge("warn", "disk nearly full") if one.is_tight and one.record is not None else Html("")
    return html("{}{} {}", badge(kind_of(one), text), away, tight)


def _disk_of(one: BookieState) -> Html:
    if one.figures is None or not one.figures.disk_total:
        return Html("–")
    used = 1 - one.figures.disk_free / one.figures.disk_total
    text = f"{bytes_text(one.figures.disk_free)} free of {bytes_text(one.figures.disk_total)}"
    return html("{}<small>{}</small>", bar(used, f"{used:.0%} used", "warn" if one.is_tight else ""), text)


def _bookie_cells(one: BookieState, moment: Now) -> list[object]:
    is_away = one.state in ("down", "silent")
    rack = one.last_record.rack if one.last_record is not None else ""
    return [
        html(
            "{} {}",
            link("/bookies", one.bookie_id, bookie=one.bookie_id),
            html("<small>rack {}</small>", rack) if rack else "",
        ),
        _state_of(one, moment),
        _disk_of(one),
        curve(
            one.entries_per_s.values, "–" if is_away else rate_text(one.entries_per_s.last), "adds per second"
        ),
        curve(one.latency_s.values, "–" if is_away else seconds_text(one.latency_s.last), "latency"),
        curve(
            one.read_bytes_per_s.values,
            "–"
            if is_away or one.read_bytes_per_s.last is None
            else f"{bytes_text(one.read_bytes_per_s.last)}/s",
            "bytes read per second",
        ),
        link("/ledgers", f"{one.figures.ledgers:,}" if one.figures else "list", bookie=one.bookie_id),
    ]


def _bookie_detail(one: BookieState, moment: Now, named_by: int) -> Html:
    record, figures = one.last_record, one.figures
    pairs: list[tuple[str, object]] = [
        ("State", _state_of(one, moment)),
        ("Disk", _disk_of(one)),
        ("Named by", link("/ledgers", ledgers_text(named_by), bookie=one.bookie_id)),
    ]
    if record is not None:
        pairs += [
            ("Addresses", ", ".join(record.addresses)),
            ("Rack", record.rack or "none"),
            ("Weight", f"{record.weight:g}"),
            ("HTTP", record.properties.get("http") or "none announced"),
        ]
    if one.order is not None:
        pairs.append(("Order", f"{one.order.mode}, by an operator"))
    if figures is not None:
        pairs += [
            ("Up for", duration_text(figures.uptime_s)),
            ("Connections", f"{figures.connections:,}"),
            (
                "Followers",
                f"{figures.ledgers_watched:,} ledgers watched, {figures.polls_waiting:,} long polls",
            ),
            ("Ledgers with lost data", f"{figures.ledgers_damaged:,}"),
        ]
    return facts(pairs)


def _bookie_curves(one: BookieState) -> Html:
    written = one.bytes_per_s.last
    name = "99th percentile of adds" if one.has_p99 else "mean of group commits"
    return html(
        '<dl class="tiles">{}{}{}{}</dl>',
        tile("Adds", rate_text(one.entries_per_s.last),
              sparkline(one.entries_per_s.values, "adds per second", SERIES_POINTS)),
        tile("Written", f"{bytes_text(written)}/s" if written is not None else "–",
              sparkline(one.bytes_per_s.values, "bytes written per second", SERIES_POINTS)),
        tile(f"Latency, {name}", seconds_text(one.latency_s.last),
              sparkline(one.latency_s.values, "latency", SERIES_POINTS)),
        tile("Read", f"{bytes_text(one.read_bytes_per_s.last)}/s"
              if one.read_bytes_per_s.last is not None else "–",
              sparkline(one.read_bytes_per_s.values, "bytes read per second", SERIES_POINTS)),
    )  # fmt: skip


# --- repair -------------------------------------------------------------------------------------------


def repair_page(model: ClusterModel, moment: Now, number: int) -> Page:
    """Return the page of ledgers that lack copies, and of who repairs them."""
    rows = model.lacking()
    start = (max(number, 1) - 1) * ROWS_PER_PAGE
    shown = rows[start : start + ROWS_PER_PAGE]
    found = table(
        ("Ledger", "Good copies", "Bookies down", "Repair", "Why"),
        [(str(row.ledger_id), _lacking_cells(model, row)) for row in shown],
        f"{ledgers_text(len(rows))}, those with the fewest good copies first",
    )
    steps = pager("/repair", LedgerQuery(page=number), len(rows))
    all_there = f"Every ledger {'' if model.is_known else 'that was read '}has all its copies."
    return Page(
        "/repair",
        "Repair",
        {
            "progress": _repair_progress(model, moment),
            "recovery": _recovery(model, moment),
            "lacking": section(
                "Ledgers that lack copies",
                html("{}{}", found, steps) if rows else nothing(all_there),
                "lacking",
            ),
        },
    )


def _repair_progress(model: ClusterModel, moment: Now) -> Html:
    """Return how far the repair is; and of bookies that are gone, when their copies are made again."""
    view, pace = model.recovery, model.pace
    parts = []
    if pace is not None:
        total = pace.done + pace.left
        estimate = pace.estimate_s(moment.now)
        left = f", about {duration_text(estimate)} left" if estimate and not view.is_paused else ""
        reading = model.repair_bytes_per_s.last
        speed = f", {bytes_text(reading)}/s read" if reading else ""
        paused = ", paused" if view.is_paused else ""
        text = f"{pace.done:,} of {total:,} ledgers repaired{left}{speed}{paused}"
        parts.append(
            html(
                '<p><label for="repair-bar">{}</label></p>'
                '<progress id="repair-bar" max="{}" value="{}">{}</progress>',
                text,
                total,
                pace.done,
                text,
            )
        )
    delay_s = view.record.delay_s
    for name in sorted(model.down):
        gone_s = view.record.gone_s.get(name)
        if gone_s is None or name in view.record.lost or not delay_s:
            continue
        text = f"bookie {name} is gone for {duration_text(gone_s)}; it is lost after {duration_text(delay_s)}"
        parts.append(html("<p>{}</p>{}", text, bar(gone_s / delay_s, text)))
    if not parts:
        return Html("")
    return section("Progress of repair", joined(parts), "progress")


def _recovery(model: ClusterModel, moment: Now) -> Html:
    view = model.recovery
    pairs: list[tuple[str, object]] = [
        ("Auditor", view.auditor or "none is elected"),
        ("Workers", f"{len(view.workers):,}"),
        ("Tasks", f"{len(view.refs):,} listed, {view.record.waiting:,} behind them"),
        ("Paused", "yes, by an operator" if view.is_paused else "no"),
        ("Lost bookies", ", ".join(view.record.lost) or "none"),
        ("Last pass", f"{view.record.ledgers:,} ledgers in {seconds_text(view.record.pass_s)}"),
    ]
    rows = [
        (
            one.name,
            [
                one.name,
                ledger_link(one.ledger_id) if one.ledger_id is not None else "idle",
                f"{one.repaired:,}",
                f"{one.failed:,}",
                bytes_text(one.bytes_read),
            ],
        )
        for one in view.workers[:ROWS_PER_PAGE]
    ]
    found = table(("Worker", "Repairs now", "Done", "Failed", "Read"), rows, f"{len(view.workers):,} workers")
    return html("{}{}", facts(pairs), section("Workers", found, "workers") if rows else "")


def _lacking_cells(model: ClusterModel, row: LackingRow) -> list[object]:
    known = model.row(row.ledger_id)
    quorum = f" of {known.write_quorum}" if known is not None else ""
    copies = Html("–")
    if row.copies is not None:
        copies = badge("bad" if row.copies <= 1 else "warn", f"{row.copies}{quorum}")
    status = {
        "repairing": f"{row.worker} repairs it now",
        "waiting": "waits for a worker",
        "failed": f"failed {row.task.attempts} times, is tried again" if row.task is not None else "failed",
        "open": "not closed: its writer replaces the bookie",
        "not due": "no task yet",
    }[row.status]
    why = (
        "; ".join(f"{reason}: {', '.join(names)}" for reason, names in row.task.reasons.items())
        if row.task
        else ""
    )
    if row.task is not None and row.task.error:
        why = f"{why}; {row.task.error}"
    return [ledger_link(row.ledger_id), copies, bookie_links(model, row.bookies) or "–", status, why or "–"]


# --- events -------------------------------------------------------------------------------------------


def events_page(model: ClusterModel, kind: str) -> Page:
    """Return the page of what happened, newest first."""
    form = html(
        '<form class="search" action="/events" role="search"><label>Kind <select name="kind">'
        '<option value="">any</option>{}</select></label><button>Show</button></form>',
        options(list(EVENT_KINDS), kind),
    )
    events = model.events.newest(EVENTS_KEPT, kind)
    note = f"The last {EVENTS_KEPT} events since this page runs. Times are UTC."
    return Page(
        "/events",
        "Events",
        {
            "search": form,
            "events": html("<p>{}</p>{}", note, _event_list(events, "Nothing has happened.")),
        },
    )


def _event_list(events: Sequence[Event], empty: str) -> Html:
    if not events:
        return nothing(empty)
    return html(
        '<ol class="events">{}</ol>',
        joined(
            html(
                '<li data-key="{}"><time>{}</time> {} <span>{}</span>{}</li>',
                event.number,
                clock_text(event.at),
                badge("warn" if EVENT_KINDS[event.kind] else "plain", event.kind),
                text_of_event(event),
                html(" {}", link("/ledger", "show", id=event.ledger_id))
                if event.ledger_id is not None
                else "",
            )
            for event in events
        ),
    )
