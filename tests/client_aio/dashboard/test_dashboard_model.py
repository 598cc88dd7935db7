"""The model of the status page: what is wrong, bookies and their curves, searches, repair, events."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from client_aio.core.audit import Condition, layout_of
from client_aio.dashboard import model as model_module
from client_aio.dashboard.cluster_pages import bookies_page, overview, repair_page
from client_aio.dashboard.layout import Now, frame, verdict
from client_aio.dashboard.model import ClusterModel, LedgerQuery, RecoveryView
from client_aio.dashboard.vitals import (
    EVENTS_KEPT,
    SERIES_POINTS,
    EventRing,
    Figures,
    Scrape,
    parsed,
    text_of_event,
    total_of,
)
from metadata.access.bookies import READ_ONLY, BookieRecord, Order
from metadata.access.repair_tasks import AuditorRecord, RepairTask, TaskRef, WorkerRecord
from metadata.errors import MetadataCorruptError
from metadata.ids import MALFORMED
from metadata.model.ledger import Fragment, LedgerMetadata, UnboundedRecord

AT = 1_790_000_000.0
BUCKET = 'bookie_aio_add_seconds_bucket{le="'


def record(name: str, **changes: Any) -> BookieRecord:
    """Return the registration of a bookie."""
    return BookieRecord(name, [f"{name}:3181"], "nonce", **changes)


def info(**changes: Any) -> dict[str, Any]:
    """Return an answer to INFO, as far as the model looks at it."""
    document = {
        "uptime_s": 10.0,
        "is_writable": True,
        "connections": 1,
        "polls_waiting": 0,
        "ledgers_watched": 2,
        "counters": {"entries_added": 0, "bytes_added": 0, "bytes_read": 0},
        "storage": {
            "groups": {"count": 0},
            "fsync_us": {"mean": 0},
            "ledgers": {"count": 3, "damaged": 0, "all_damaged": False},
            "disk": {"free_bytes": 600, "total_bytes": 1000, "is_tight": False, "is_full": False},
        },
    }
    for path, value in changes.items():
        at: Any = document
        *parents, name = path.split("__")
        for parent in parents:
            at = at[parent]
        at[name] = value
    return document


def figures(**changes: Any) -> Figures:
    """Return the figures of a bookie."""
    return Figures.of(info(**changes))


def ledger(ledger_id: int, *bookies: str, last: int | None = 9, **changes: Any) -> LedgerMetadata:
    """Return the metadata of a ledger on three bookies, closed unless `last` is None."""
    metadata = LedgerMetadata.new(
        ledger_id, ensemble_size=3, write_quorum=3, ack_quorum=2, bookies=bookies or ("b1", "b2", "b3")
    )
    return replace(metadata if last is None else metadata.close(last, 100), **changes)


def note(model: ClusterModel, *ledgers: LedgerMetadata) -> None:
    """Have the model know some ledgers, as read now."""
    for one in ledgers:
        model.note_ledger(one.ledger_id, one, layout_of(one), AT)


def look(model: ClusterModel, *running: str, now: float = 0.0, **orders: Order) -> None:
    """Have the model see which bookies are registered."""
    names = {one: record(one) for one in running}
    model.note_bookies(names, orders, ["b1", "b2", "b3"], now=now, at=AT + now)


@pytest.fixture
def model() -> ClusterModel:
    """A healthy cluster of three bookies, with a ledger that is closed and one that is open."""
    found = ClusterModel()
    look(found, "b1", "b2", "b3")
    found.note_metadata("", AT)
    found.note_listing([1, 2])
    note(found, ledger(1), ledger(2, last=None))
    found.note_pass(is_over=True)
    view = RecoveryView("b1", AuditorRecord("b1"), [WorkerRecord("b1")])
    found.note_recovery(view, now=0.0, at=AT)
    return found


def kinds(model: ClusterModel) -> list[str]:
    return [event.kind for event in model.events]


def texts(model: ClusterModel) -> list[str]:
    return [text_of_event(event) for event in model.events]


def test_a_healthy_cluster_has_no_problem_and_no_news(model: ClusterModel) -> None:
    assert (model.condition, model.is_known) == (Condition.HEALTHY, True)
    assert (model.problems, kinds(model)) == ([], ["auto recovery"])
    assert model.ledgers_by_state == {"OPEN": 1, "CLOSED": 1}


def test_what_was_never_read_is_not_called_healthy() -> None:
    model = ClusterModel()
    assert not model.is_known
    assert [problem.text for problem in model.problems][:1] == [
        "the metadata store: the metadata are not read yet"
    ]


def test_a_ledger_that_is_read_as_soon_as_it_is_listed_changes_no_verdict(model: ClusterModel) -> None:
    model.note_listing([1, 2, 3])
    assert (verdict(model)[1], model.problems) == ("healthy", [])
    note(model, ledger(3))
    model.note_pass(is_over=True)
    assert (verdict(model)[1], model.problems) == ("healthy", [])


def test_what_a_later_listing_found_and_nobody_read_is_not_called_healthy(model: ClusterModel) -> None:
    model.note_listing([1, 2, 3, 4, 5])
    note(model, ledger(4))
    model.note_pass(is_over=True)
    assert (verdict(model), model.is_known) == (("unknown", "reading"), False)
    text = "the metadata of 3 of 5 ledgers have been read so far"
    assert [problem.text for problem in model.problems] == [text]
    assert text in str(overview(model, Now(0.0, AT)).regions["banner"])
    assert "Every ledger that was read has" in str(repair_page(model, Now(0.0, AT), 1).regions["lacking"])
    look(model, "b1")  # what is known is told all the same
    assert verdict(model)[1] == "at risk"
    look(model, "b1", "b2", "b3")

    model.note_listing([1, 2, 3, 4, 5, 6])  # a fresh one, while the others are late
    note(model, ledger(3))
    model.note_ledger(5, MetadataCorruptError("damaged"), None, AT)
    assert (model.is_known, verdict(model)[1]) == (False, "at risk")
    model.drop(6)
    assert (model.is_known, verdict(model)[1]) == (True, "at risk")
    note(model, ledger(5))
    assert (verdict(model)[1], model.problems) == ("healthy", [])


def test_ledgers_that_are_deleted_unread_are_waited_for_by_nobody(model: ClusterModel) -> None:
    model.note_listing([1, 2, 3])
    model.note_pass(is_over=True)
    assert not model.is_known
    model.note_listing([1, 2])
    assert (model.is_known, model.problems) == (True, [])


def test_a_bookie_that_goes_is_a_problem_and_an_event_and_its_return_ends_both(model: ClusterModel) -> None:
    look(model, "b1", "b3", now=5.0)
    assert model.bookies["b2"].state == "down"
    assert model.bookies["b2"].away_since == 5.0
    assert model.condition is Condition.DEGRADED
    assert "bookie b2 is down, and 2 ledgers name it" in [problem.text for problem in model.problems]
    assert texts(model)[-1] == "bookie b2 is down; it is named by 2 ledgers"
    rows = {row.ledger_id: row for row in model.lacking()}
    assert (rows[1].copies, rows[1].bookies, rows[1].status) == (2, ("b2",), "not due")
    assert (rows[2].copies, rows[2].bookies, rows[2].status) == (None, ("b2",), "open")
    look(model, "b1", "b2", "b3", now=9.0)
    assert (model.condition, model.lacking(), texts(model)[-1]) == (
        Condition.HEALTHY,
        [],
        "bookie b2 is back",
    )


def test_two_bookies_down_put_data_at_risk(model: ClusterModel) -> None:
    look(model, "b1")
    assert model.condition is Condition.AT_RISK
    assert model.problems[0].condition is Condition.AT_RISK


def test_a_bookie_without_an_answer_is_silent_before_its_registration_ends(model: ClusterModel) -> None:
    model.note_figures("b2", figures(), now=1.0, at=AT)
    model.note_figures("b2", None, now=2.0, at=AT)
    model.note_figures("b2", None, now=3.0, at=AT)
    assert (model.bookies["b2"].state, model.bookies["b2"].away_since) == ("silent", 2.0)
    assert model.condition is Condition.DEGRADED
    assert kinds(model)[-1:] == ["bookie silent"]
    look(model, "b1", "b3", now=4.0)
    assert (model.bookies["b2"].state, model.bookies["b2"].away_since) == ("down", 2.0)


def test_bookies_are_sorted_as_people_sort() -> None:
    model = ClusterModel()
    look(model, "b10", "b2", "b1", "a", "9", "b", "b02")
    assert list(model.bookies) == ["9", "a", "b", "b1", "b02", "b2", "b3", "b10"]


def test_an_order_is_no_fault(model: ClusterModel) -> None:
    look(model, "b1", "b2", "b3", b2=Order(READ_ONLY))
    assert (model.bookies["b2"].state, model.condition) == ("read-only", Condition.HEALTHY)
    assert texts(model)[-1] == "bookie b2 is read-only"


def test_disks_that_are_nearly_full_are_a_problem(model: ClusterModel) -> None:
    model.note_figures("b1", figures(storage__disk__free_bytes=40), now=1.0, at=AT)
    model.note_sample()
    assert [problem.text for problem in model.problems] == ["the disks of bookie b1 are nearly full"]


def test_curves_are_rates_between_two_answers_and_have_gaps(model: ClusterModel) -> None:
    one = model.bookies["b1"]
    for second, entries in enumerate((0, 10, 30)):
        answer = figures(counters__entries_added=entries, uptime_s=10.0 + second)
        model.note_figures("b1", answer, now=2.0 * second, at=AT)
        model.note_sample()
    assert list(one.entries_per_s.values) == [None, 5.0, 10.0]
    model.note_sample()  # no new answer
    model.note_figures("b1", figures(uptime_s=0.5), now=9.0, at=AT)  # it was started again
    model.note_sample()
    assert list(one.entries_per_s.values)[3:] == [None, None]
    assert total_of(model.bookies.values(), "entries_per_s") == [None, 5.0, 10.0, None, None]
    for _ in range(100):
        model.note_sample()
    assert len(one.entries_per_s.values) == SERIES_POINTS


def exposition(counts: dict[str, int], nonce: str = "nonce") -> str:
    """Return what a bookie's `/metrics` say of adds."""
    lines = [f'bookie_aio_bookie_info{{bookie_id="b1",nonce="{nonce}",address="x"}} 1.0']
    lines += [
        f'bookie_aio_add_seconds_bucket{{le="{bound}"}} {float(count)}' for bound, count in counts.items()
    ]
    return "\n".join(["# HELP something else", *lines, "bookie_aio_add_seconds_count 9.0", ""])


def test_latency_is_the_99th_percentile_of_the_adds_since_the_sample_before(model: ClusterModel) -> None:
    first = Scrape.of(exposition({"0.001": 1000, "0.01": 1000, "+Inf": 1000}))
    second = Scrape.of(exposition({"0.001": 1000, "0.01": 1099, "+Inf": 1100}))
    assert second.p99_since(first) == 0.01
    assert second.p99_since(second) is None
    assert Scrape.of(exposition({"0.001": 1, "0.01": 1, "+Inf": 9})).p99_since(first) is None
    for number, scrape in enumerate((first, second)):
        model.note_figures("b1", figures(uptime_s=1.0 + number), scrape, now=number, at=AT)
        model.note_sample()
    assert (model.bookies["b1"].has_p99, model.bookies["b1"].latency_s.last) == (True, 0.01)


BOUND = st.sampled_from(["0.001", "0.01", "1", "-1", "nan", "+Inf", "-Inf", "1e999", "", "1_0", "x"])
COUNT = st.one_of(st.integers(-1, 2**70), st.sampled_from([math.inf, math.nan, 0, 1, 1000]))


@given(st.lists(st.tuples(BOUND, COUNT, COUNT), max_size=4))
@example([("+Inf", 0, 1)])
def test_whatever_metrics_say_is_a_latency_or_malformed(buckets: list[tuple[str, float, float]]) -> None:
    found = []
    for scrape in (0, 1):
        with suppress(*MALFORMED):
            found.append(Scrape.of("\n".join(f'{BUCKET}{one[0]}"}} {one[1 + scrape]}' for one in buckets)))
    for before, after in product(found, repeat=2):
        latency = after.p99_since(before)
        assert latency is None or 0 <= latency < math.inf


@pytest.mark.parametrize(
    "bounds",
    [
        ("+Inf",),
        ("-Inf", "+Inf"),
        ("nan", "+Inf"),
        ("0.001", "0.01"),
        ("0.01", "0.001", "+Inf"),
        ("1", "1", "+Inf"),
    ],
)
def test_bounds_that_no_histogram_has_are_malformed(bounds: tuple[str, ...]) -> None:
    with pytest.raises(MALFORMED):
        Scrape.of("".join(f'{BUCKET}{bound}"}} 1.0\n' for bound in bounds))


def test_metrics_without_adds_are_none_that_could_be_told(model: ClusterModel) -> None:
    nothing = Scrape.of(exposition({}))
    assert nothing.p99_since(nothing) is None


FIGURE = st.one_of(
    st.sampled_from([0, 1, 2**63 - 1, 1e-300, 1e18, 9.2e18]), st.floats(0, 2**63, exclude_max=True)
)


@given(st.lists(st.lists(FIGURE, min_size=11, max_size=11), min_size=2, max_size=4))
def test_no_figures_of_a_bookie_keep_a_page_from_being_made(answers: list[list[float]]) -> None:
    model = ClusterModel()
    look(model, "b1")
    names = [
        "uptime_s", "connections", "polls_waiting", "ledgers_watched", "counters__entries_added",
        "counters__bytes_added", "counters__bytes_read", "storage__groups__count", "storage__fsync_us__mean",
        "storage__disk__free_bytes", "storage__disk__total_bytes",
    ]  # fmt: skip
    for number, values in enumerate(answers):
        document = info(**dict(zip(names, values, strict=True)))
        model.note_figures("b1", Figures.of(document), now=2.0 * number, at=AT)
        model.note_sample()
        moment = Now(2.0 * number, AT)
        for page in (
            overview(model, moment),
            bookies_page(model, moment, ""),
            bookies_page(model, moment, "b1"),
        ):
            assert frame(page, model, moment)


def test_metrics_of_another_process_at_the_same_address_do_not_count(model: ClusterModel) -> None:
    foreign = Scrape.of(exposition({"0.001": 1, "+Inf": 1}, nonce="other"))
    model.note_figures("b1", figures(), foreign, now=1.0, at=AT)
    assert model.bookies["b1"].scrape is None


def test_without_metrics_latency_is_the_mean_of_commits_while_that_can_be_told(model: ClusterModel) -> None:
    def latency(*answers: tuple[int, int]) -> float | None:
        for number, (groups, mean_us) in enumerate(answers):
            answer = figures(
                storage__groups__count=groups, storage__fsync_us__mean=mean_us, uptime_s=1.0 + number
            )
            model.note_figures("b1", answer, now=number, at=AT)
            model.note_sample()
        return model.bookies["b1"].latency_s.last

    assert latency((10, 1000), (20, 2000)) == pytest.approx(0.003)
    assert latency((10_000_000, 1000), (10_000_010, 1000)) is None  # the rounding is larger


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        info(uptime_s="1"),
        info(uptime_s=float("nan")),
        info(uptime_s=-1),
        info(counters__entries_added=2**70),
        info(storage__disk=None),
        info(connections=True),
    ],
)
def test_an_answer_that_is_none_of_ours_is_no_answer(document: Any) -> None:
    assert parsed(document) is None


def test_an_ensemble_change_a_takeover_and_a_repair_are_events(model: ClusterModel) -> None:
    before = ledger(2, last=None)
    grown = replace(before, fragments=(Fragment(0, ("b1", "b2", "b3")), Fragment(5, ("b1", "b4", "b3"))))
    note(model, grown)
    assert texts(model)[-1] == "ledger 2: ensemble changed, b2 → b4"
    note(model, ledger(1, "b1", "b4", "b3"))
    assert texts(model)[-1] == "ledger 1: b4 in place of b2"
    unbounded = ledger(7, last=None, unbounded=UnboundedRecord("payments"))
    note(model, unbounded)
    note(model, replace(unbounded, term=1))
    assert texts(model)[-1] == "ledger 7 was taken over, term 1"


def test_what_changes_while_all_is_read_for_the_first_time_is_no_event() -> None:
    model = ClusterModel()
    look(model, "b1", "b2", "b3")
    note(model, ledger(2, last=None))
    note(model, ledger(2, "b1", "b4", "b3", last=None), ledger(2))
    assert kinds(model) == []


def test_a_repair_that_was_over_before_a_task_was_seen_is_told(model: ClusterModel) -> None:
    view = RecoveryView("b1", AuditorRecord("b1"), [WorkerRecord("b1")])
    look(model, "b1", "b3")
    model.note_recovery(view, now=1.0, at=AT)
    note(model, ledger(1, "b1", "b4", "b3"))
    model.note_recovery(view, now=2.0, at=AT)
    assert texts(model)[-1] == "the repair of 1 ledger is over"


def test_events_alike_are_counted_together_and_the_ring_is_bounded() -> None:
    events = EventRing()
    for ledger_id in range(500):
        events.add(AT, "ensemble changed", "b2 → b4", "{ledgers}: ensemble changed, b2 → b4", ledger_id)
    assert [text_of_event(one) for one in events] == ["500 ledgers: ensemble changed, b2 → b4"]
    for number in range(EVENTS_KEPT + 5):
        events.add(AT + number, "bookie lost", f"b{number}", f"bookie b{number} is down")
    assert len(events) == EVENTS_KEPT
    assert events.newest(1)[0].subject == f"b{EVENTS_KEPT + 4}"
    assert events.newest(9, "ensemble changed") == []


def test_damaged_metadata_put_data_at_risk_until_they_parse(model: ClusterModel) -> None:
    model.note_ledger(1, MetadataCorruptError("damaged"), None, AT)
    assert (model.condition, model.knows(1)) == (Condition.AT_RISK, True)
    note(model, ledger(1))
    assert model.condition is Condition.HEALTHY


def test_a_metadata_store_that_is_away_is_a_problem_and_the_rest_stays(model: ClusterModel) -> None:
    model.note_metadata("no answer within 5 s", AT + 1)
    assert not model.is_known
    assert model.problems[0].text == "the metadata store: no answer within 5 s"
    assert (model.metadata_at, model.ledgers_listed) == (AT, 2)
    model.note_metadata("", AT + 2)
    assert (model.is_known, texts(model)[-1]) == (True, "the metadata store answers again")


def test_the_progress_of_a_repair(model: ClusterModel) -> None:
    def view(*ledger_ids: int, busy: int | None = None, read: int = 0) -> RecoveryView:
        refs = [TaskRef(2, one, f"{one:016x}") for one in ledger_ids]
        tasks = {one: RepairTask({"lost": ["b2"]}, 0) for one in ledger_ids}
        worker = WorkerRecord("b1", busy, bytes_read=read)
        return RecoveryView("b1", AuditorRecord("b1"), [worker], False, refs, tasks)

    assert model.note_recovery(view(1, 2, 3, busy=2), now=0.0, at=AT) == []
    assert model.pace is not None
    assert {row.ledger_id: (row.status, row.worker) for row in model.lacking()} == {
        1: ("waiting", ""),
        2: ("repairing", "b1"),
        3: ("waiting", ""),
    }
    assert model.note_recovery(view(3, read=2_000_000), now=2.0, at=AT) == [1, 2]
    assert (model.pace.done, model.pace.left, model.repair_bytes_per_s.last) == (2, 1, 1_000_000.0)
    assert model.note_recovery(view(), now=4.0, at=AT) == [3]
    assert model.pace is None
    assert kinds(model)[-4:] == ["auto recovery", "repair began", "repaired", "repair over"]
    assert texts(model)[-2:] == ["3 ledgers: the repair task is done", "the repair of 3 ledgers is over"]


def test_search_by_id_name_log_state_bookie_and_lacking(model: ClusterModel) -> None:
    note(
        model,
        ledger(30, "b4", "b2", "b3", log="orders"),
        ledger(31, last=None, unbounded=UnboundedRecord("payments")),
        ledger(310),
    )

    def found(**query: Any) -> list[int]:
        return [row.ledger_id for row in model.select(LedgerQuery(**query), 50)[0]]

    assert found() == [310, 31, 30, 2, 1]
    assert found(text="31") == [31]
    assert found(text="ORD") == [30]
    assert found(text="pay") == [31]
    assert found(state="OPEN") == [31, 2]
    assert found(bookie="b4") == [30]
    assert found(bookie="b1", state="CLOSED") == [310, 1]
    assert found(text="9" * 30) == []
    look(model, "b1", "b3")
    assert found(lacking=True, state="CLOSED") == [310, 30, 1]
    assert [row.ledger_id for row in model.select(LedgerQuery(page=2), 2)[0]] == [30, 2]
    assert model.select(LedgerQuery(), 2)[1] == 5


def test_the_newest_ledgers_are_kept_for_lists_and_all_are_audited(
    model: ClusterModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "LEDGERS_KEPT", 3)
    note(model, *(ledger(number) for number in range(10, 20)))
    assert (model.newest_first(), model.rows_kept) == ([19, 18, 17], 3)
    look(model, "b1", "b3")
    assert len(model.lacking()) == 12
    model.note_listing([10, 19])
    assert (model.newest_first(), len(model.lacking())) == ([19], 2)
