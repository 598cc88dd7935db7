"""The pages of the status page: text of others stays text, every page is whole, numbers are readable."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_aio.core.audit import layout_of
from client_aio.dashboard.cluster_pages import bookies_page, events_page, overview, repair_page
from client_aio.dashboard.layout import Now, Page, document, frame, title
from client_aio.dashboard.ledger_pages import ledger_page, ledgers_page, log_page, logs_page
from client_aio.dashboard.markup import (
    Html,
    bytes_text,
    clock_text,
    duration_text,
    html,
    rate_text,
    seconds_text,
    sparkline,
    strip_widths,
    url,
)
from client_aio.dashboard.model import ClusterModel, LedgerQuery, RecoveryView
from client_aio.dashboard.observer import LedgerView, LogView
from client_aio.dashboard.vitals import Series
from metadata.access.bookies import BookieRecord
from metadata.access.repair_tasks import AuditorRecord, RepairTask, TaskRef, WorkerRecord
from metadata.model.given_up import GivenUp
from metadata.model.ledger import Fragment, LedgerMetadata
from metadata.model.log import LogHead, LogRow, Transaction

HOSTILE = "<script>alert(1)</script>\"'&\u202e\x1b[31m"
MOMENT = Now(100.0, 1_790_000_000.0)
VOID = {"meta", "link", "input", "br"}


class Tags(HTMLParser):
    """Reads a page, and fails unless all tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def hostile_pages() -> list[tuple[ClusterModel, Page]]:
    """Return every page of a cluster in which others chose hostile text wherever they can."""
    model = ClusterModel()
    records = {
        name: BookieRecord(name, ["h:1"], "n", rack=HOSTILE, properties={"http": HOSTILE})
        for name in ("b1", "b2")
    }
    model.note_bookies(records, {}, ["b1", "b2", "b3"], now=0.0, at=MOMENT.at)
    metadata = LedgerMetadata.new(
        7, ensemble_size=3, write_quorum=3, ack_quorum=2, bookies=("b1", "b2", "b3"),
        custom={HOSTILE: HOSTILE.encode()},
    )  # fmt: skip
    grown = replace(metadata, fragments=(*metadata.fragments, Fragment(5, ("b1", "b2", "b4"))), log=HOSTILE)
    closed = replace(metadata.close(9, 10), given_up=GivenUp(9, ("b1",), 1))
    model.note_listing([7])
    model.note_ledger(7, metadata, layout_of(metadata), MOMENT.at)
    model.note_pass(is_over=True)
    model.note_ledger(7, grown, layout_of(grown), MOMENT.at)
    model.note_logs([HOSTILE])
    model.note_metadata(HOSTILE, MOMENT.at)
    task = RepairTask({"lost": [HOSTILE]}, 0, 1, HOSTILE)
    view = RecoveryView(
        HOSTILE, AuditorRecord(HOSTILE, {"b3": 5.0}, [], 10.0), [WorkerRecord(HOSTILE, 7)], True,
        [TaskRef(1, 7, "x")], {7: task},
    )  # fmt: skip
    model.note_recovery(view, now=0.0, at=MOMENT.at)
    head = LogHead("orders", transactions=(Transaction(HOSTILE, 3),))
    rows = (LogRow(7, 7, 0), LogRow(8, 8, 0))
    look = LedgerView(7, grown, lac=3)
    series = Series()
    series.add(1.0)
    return [
        (model, page)
        for page in (
            overview(model, MOMENT),
            bookies_page(model, MOMENT, ""),
            bookies_page(model, MOMENT, "b1"),
            bookies_page(model, MOMENT, HOSTILE),
            ledgers_page(model, MOMENT, LedgerQuery()),
            ledgers_page(model, MOMENT, LedgerQuery(HOSTILE, HOSTILE, HOSTILE)),
            ledger_page(model, MOMENT, look),
            ledger_page(model, MOMENT, LedgerView(7, closed, lac=9)),
            ledger_page(model, MOMENT, LedgerView(7, grown, lac_error=HOSTILE)),
            ledger_page(model, MOMENT, LedgerView(7, None, HOSTILE)),
            logs_page(model, "", 1),
            logs_page(model, HOSTILE, 1),
            log_page(model, MOMENT, LogView(HOSTILE, head, "", 1, rows, look, series)),
            log_page(model, MOMENT, LogView(HOSTILE, None, HOSTILE)),
            repair_page(model, MOMENT, 1),
            events_page(model, ""),
            events_page(model, HOSTILE),
        )
    ]


@pytest.mark.parametrize(("model", "page"), hostile_pages(), ids=lambda one: getattr(one, "title", "")[:12])
def test_text_of_others_stays_text(model: ClusterModel, page: Page) -> None:
    whole = str(document(page, model, MOMENT, HOSTILE, "/live"))
    tags = Tags(whole)
    assert [attributes.get("src") for tag, attributes in tags.seen if tag == "script"] == ["/static/page.js"]
    assert not {name for _, attributes in tags.seen for name in attributes if name.startswith("on")}
    assert not any("style" in attributes for _, attributes in tags.seen)
    assert not {"\x1b", "\u202e"} & set(whole)
    targets = [
        value or "" for _, attributes in tags.seen for name, value in attributes.items() if name == "href"
    ]
    assert all(target.startswith(("/", "#")) for target in targets)


@pytest.mark.parametrize(("model", "page"), hostile_pages(), ids=lambda one: getattr(one, "title", "")[:12])
def test_every_id_is_there_once_and_every_region_can_be_updated(model: ClusterModel, page: Page) -> None:
    tags = Tags(str(document(page, model, MOMENT, "sqlite:///x", "/live")))
    ids = [attributes["id"] for _, attributes in tags.seen if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert set(frame(page, model, MOMENT)) == {
        attributes["id"] for _, attributes in tags.seen if "data-region" in attributes
    }


@pytest.mark.parametrize("make", [overview, lambda model, now: repair_page(model, now, 9)])
def test_a_page_of_which_nothing_is_known_yet_says_so(make: object) -> None:
    model = ClusterModel()
    page = make(model, MOMENT)  # type: ignore[operator]
    text = " ".join(Tags(str(document(page, model, MOMENT, "sqlite:///x", "/live"))).text)
    assert "not known" in text
    assert "healthy" not in text
    assert title(page, model).startswith("? not known")


@given(st.text())
def test_a_value_in_markup_reads_as_the_text_that_it_was_but_for_control_characters(value: str) -> None:
    parsed = Tags(str(html("<p title='{0}'>{0}</p>", value)))
    assert [tag for tag, _ in parsed.seen] == ["p"]
    if value.isprintable() and value.isascii():
        assert "".join(parsed.text) == value
    assert html("{}", Html("<b></b>")) == "<b></b>"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (bytes_text(0), "0 B"), (bytes_text(1536), "1.5 KiB"), (bytes_text(300 << 30), "300 GiB"),
        (bytes_text(2**63), "8.0 EiB"), (bytes_text(None), "–"), (rate_text(0.0), "0/s"),
        (rate_text(999.6), "1k/s"), (rate_text(640.7), "641/s"),
        (rate_text(0.25), "0.25/s"), (rate_text(12_345.0), "12.3k/s"), (rate_text(2.5e6), "2.5M/s"),
        (seconds_text(0.00084), "840 µs"), (seconds_text(0.0032), "3.2 ms"), (seconds_text(1.5), "1.5 s"),
        (seconds_text(0.0), "0 s"), (duration_text(0.4), "0 s"), (duration_text(65.0), "1 min 5 s"),
        (duration_text(7200.0), "2 h"), (duration_text(97_200.0), "1 d 3 h"), (duration_text(-5.0), "0 s"),
        (clock_text(1_790_000_000.0), "14:13:20"), (url("/x", q="a b", page=1, state=""), "/x?q=a+b&page=1"),
    ],
)  # fmt: skip
def test_numbers_for_people(found: str, expected: str) -> None:
    assert found == expected


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=200, unique=True), st.booleans())
def test_fragments_fill_the_strip_in_order(firsts: list[int], is_closed: bool) -> None:
    starts = [0, *sorted(firsts)]
    fragments = [Fragment(start, ("b1",)) for start in starts]
    places = strip_widths(fragments, starts[-1] + 5 if is_closed else None)
    assert places[0][0] == 0
    assert places[-1][1] in (1000, 1001)
    assert all(start < end for start, end in places)
    assert all(before[0] <= after[0] for before, after in pairwise(places))


def test_a_curve_has_a_gap_where_nothing_was_measured() -> None:
    drawn = sparkline([1.0, 2.0, None, 4.0], "adds", 4)
    assert drawn.count("<polyline") == 2
    assert 'points="0,20 40,14"' in drawn
    assert sparkline([], "adds", 4).count("<polyline") == 0
