"""Metrics: the histograms count right, the tables keep the conventions, and docs/METRICS.md lists them all.

`python -m tests.test_metrics` writes the tables of docs/METRICS.md again.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bookie_aio import metrics as of_bookie
from client_aio import metrics as of_client
from client_aio.context import ClientCounters
from client_aio.ledger.replication import AddTimes
from metadata.metrics import (
    BYTES,
    COUNTS,
    FINE_SECONDS,
    SECONDS,
    Histogram,
    check,
    counter,
    document,
    families,
    gauge,
    histogram,
    info,
    render,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from client_aio.core.add_window import AddWindow
    from metadata.metrics import Metric

PAGE = Path(__file__).parent.parent / "docs" / "METRICS.md"
TABLES: dict[str, Sequence[Metric]] = {
    "bookie": of_bookie.METRICS,
    "client": of_client.CLIENT_METRICS,
    "autorecovery": of_client.AUTO_RECOVERY_METRICS,
}


def block_of(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n)(.*?)(?=<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_lists_every_metric_as_the_code_has_it(name: str) -> None:
    found = block_of(name).search(PAGE.read_text())
    assert found is not None, f"docs/METRICS.md has no table of {name}"
    assert found[0] == document(TABLES[name]), "write the tables again: python -m tests.test_metrics"


def test_every_name_in_the_page_is_that_of_a_metric() -> None:
    known = {metric.name for table in TABLES.values() for metric in table}
    suffixes = ("", "_bucket", "_sum", "_count")
    named = set(re.findall(r"bookie_aio_\w+", PAGE.read_text())) - {"bookie_aio_server"}
    unknown = {name for name in named if not any(name.removesuffix(one) in known for one in suffixes)}
    assert not unknown


def test_all_tables_keep_the_conventions_together() -> None:
    check([metric for table in TABLES.values() for metric in table])


@pytest.mark.parametrize(
    "wrong",
    [
        counter("a_seconds", "seconds", "Help.", float),
        gauge("a_total", "", "Help.", float),
        gauge("a", "seconds", "Help.", float),
        gauge("a_ms", "ms", "Help.", float),
        gauge("a_bytes", "", "Help.", float),
        gauge("a", "", "no sentence", float),
    ],
    ids=lambda metric: f"{metric.name}-{metric.unit}-{metric.help}",
)
def test_a_metric_that_breaks_a_convention_is_refused(wrong: Metric) -> None:
    with pytest.raises(ValueError, match=wrong.name):
        check([wrong])


def test_two_metrics_of_one_name_are_refused() -> None:
    one = gauge("a", "", "Help.", float)
    with pytest.raises(ValueError, match="same name"):
        check([one, one])


def test_fine_bounds_are_at_most_ten_percent_apart_from_a_tenth_of_a_millisecond_to_ten_seconds() -> None:
    assert FINE_SECONDS[0] == 1e-4
    assert FINE_SECONDS[-1] >= 10
    assert max(high / low for low, high in pairwise(FINE_SECONDS)) < 1.1001
    for bounds in (SECONDS, BYTES, COUNTS):
        assert all(low < high for low, high in pairwise(bounds))


values = st.lists(st.floats(1e-4, 9.9), min_size=1, max_size=200)


@given(values, st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_the_value_or_above_it_by_one_bucket(measured: list[float], share: float) -> None:
    found = Histogram(FINE_SECONDS)
    for value in measured:
        found.add(value)
    exact = sorted(measured)[math.ceil(share * len(measured) - 1e-9) - 1]
    assert exact <= found.percentile(share) * (1 + 1e-9)
    assert found.percentile(share) <= exact * 1.101
    assert (found.count, found.highest) == (len(measured), max(measured))
    assert found.total == pytest.approx(sum(measured))


@given(values)
def test_a_histogram_comes_out_of_a_scrape_as_it_was_counted(measured: list[float]) -> None:
    found = Histogram()
    for value in measured:
        found.add(value, 2)
    table = [histogram("a_seconds", "seconds", "Help.", lambda of: {"x": of}, "stage")]
    (text,) = (render(family).decode() for family in families(table, {"": found}))
    (family,) = text_string_to_metric_families(text)
    reached = {sample.labels["le"]: sample.value for sample in family.samples if "le" in sample.labels}
    for bound in SECONDS:
        assert reached[f"{bound:.12g}"] == 2 * sum(value <= bound for value in measured)
    assert reached["+Inf"] == 2 * len(measured)


def test_a_value_that_equals_a_bound_is_below_it() -> None:
    found = Histogram((1.0, 2.0))
    found.add(1.0)
    assert found.counts == [1, 0, 0]
    assert bisect_left(found.bounds, 1.0) == 0
    assert Histogram().percentile(0.5) == 0


def test_sources_are_told_apart_by_a_label_and_what_is_absent_is_left_out() -> None:
    table = [
        counter("a_total", "", "Help.", lambda of: of.get("a")),
        gauge("b", "", "Help.", lambda of: {("x", "y"): 1.0}, "one", "two"),
        info("c_info", "Help.", lambda of: {"name": 'q"uote', "more": "left out"}, "name"),
    ]
    text = b"".join(map(render, families(table, {"first": {"a": 3}, "second": {}}, "client"))).decode()
    samples = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert samples == [
        ("a_total", {"client": "first"}, 3),
        ("b", {"client": "first", "one": "x", "two": "y"}, 1),
        ("b", {"client": "second", "one": "x", "two": "y"}, 1),
        ("c_info", {"client": "first", "name": 'q"uote'}, 1),
        ("c_info", {"client": "second", "name": 'q"uote'}, 1),
    ]


class Window:
    """The part of an add window that `AddTimes` looks at."""

    last_add_pushed = -1
    length_confirmed = 0


def times_at(now: list[float]) -> tuple[AddTimes, Window, ClientCounters]:
    window, counters = Window(), ClientCounters(lambda: now[0])
    return AddTimes(counters, cast("AddWindow[Any]", window)), window, counters


def counted(counters: ClientCounters) -> dict[float, int]:
    """Return the upper bounds of the buckets that are not empty, with their counts."""
    histogram = counters.add
    return {bound: count for bound, count in zip(histogram.bounds, histogram.counts, strict=False) if count}


def bound_of(seconds: float) -> float:
    return FINE_SECONDS[bisect_left(FINE_SECONDS, seconds)]


@pytest.mark.pure  # with a window of its own
def test_adds_are_timed_from_their_iteration_to_their_report_whatever_comes_between() -> None:
    now = [100.003]
    times, window, counters = times_at(now)
    times.began = 100.0
    times.added(9)  # ten entries
    times.added(9)
    times.began = 100.1
    times.added(14)
    now[0], window.length_confirmed = 100.303, 50
    times.reported(4)
    assert counted(counters) == {bound_of(0.303): 5}
    now[0], window.length_confirmed = 101.303, 150
    times.reported(14)
    assert counted(counters) == {bound_of(0.303): 5, bound_of(1.303): 5, bound_of(1.203): 5}
    assert counters.bytes_added == 150
    times.reported(14)
    assert counters.add.count == 15


@pytest.mark.pure
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=1000))
def test_every_add_is_timed_once_however_bursts_and_reports_lie(steps: list[tuple[int, int]]) -> None:
    now = [0.0]
    times, _, counters = times_at(now)
    pushed = reported = -1
    began: dict[int, float] = {}
    expected = Histogram(FINE_SECONDS)
    for added, acknowledged in steps:
        now[0] += 0.01
        times.began = now[0]
        began |= dict.fromkeys(range(pushed + 1, pushed + added + 1), now[0])
        pushed += added
        times.added(pushed)
        now[0] += 0.02
        before, reported = reported, min(pushed, reported + acknowledged)
        for entry in range(before + 1, reported + 1):
            expected.add(now[0] - began[entry])
        if reported > before:
            times.reported(reported)
    assert counters.add.counts == expected.counts
    assert counters.add.total == pytest.approx(expected.total)


def main() -> None:
    """Write the tables of the page again."""
    text = PAGE.read_text()
    for name, table in TABLES.items():
        rows = document(table)
        text = block_of(name).sub(lambda _, rows=rows: rows, text)  # type: ignore[misc]
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
