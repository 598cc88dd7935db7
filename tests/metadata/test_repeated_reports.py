"""Reports that repeat: one at once, and then ever more rarely, with a count."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

from metadata.repeated_reports import PERIOD_S, RepeatedReports

if TYPE_CHECKING:
    import pytest

logger = logging.getLogger(__name__)


class ManualLoop:
    """Timers that fire when a test lets the time pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Any]] = []

    def call_later(self, delay: float, function: Any, *arguments: object) -> asyncio.Handle:
        handle = asyncio.Handle(function, arguments, cast("Any", self))
        self.timers.append((self.now + delay, handle))
        return handle

    def get_debug(self) -> bool:
        return False

    def run_until(self, now: float) -> None:
        """Let the time pass."""
        while due := [each for each in self.timers if each[0] <= now]:
            each = min(due, key=lambda timer: timer[0])
            self.timers.remove(each)
            self.now, handle = each
            if not handle.cancelled():
                handle._run()
        self.now = now


def reports_on(loop: ManualLoop, keys_max: int = 9) -> RepeatedReports:
    return RepeatedReports(cast("Any", loop), longest_s=4 * PERIOD_S, keys_max=keys_max)


def test_a_report_that_repeats_is_written_at_once_and_then_ever_more_rarely() -> None:
    loop = ManualLoop()
    reports, written = reports_on(loop), []
    for second in range(0, 901, 10):
        loop.run_until(second)
        reports.report("a", lambda count, at=second: written.append((loop.now, at, count)))
    assert written == [(0, 0, 0), (60, 50, 5), (180, 170, 12), (420, 410, 24), (660, 650, 24), (900, 890, 24)]


def test_a_report_that_has_not_come_for_a_period_is_new() -> None:
    loop = ManualLoop()
    reports, written = reports_on(loop), []
    for second in (0, 61, 122):
        loop.run_until(second)
        reports.report("a", written.append)
    assert written == [0, 0, 0]
    assert len(loop.timers) == 1


def test_the_counts_that_are_left_are_written_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    loop = ManualLoop()
    reports = reports_on(loop)
    for number in range(3):
        reports.warn(logger, "a", "attempt %d", number)
    reports.warn(logger, "b", "%s", "100 %")
    reports.close()
    assert [record.getMessage() for record in caplog.records] == [
        "attempt 0", "100 %", "attempt 2 (2 times since the last report)",
    ]  # fmt: skip
    loop.run_until(1000)
    assert len(caplog.records) == 3


def test_too_many_keys_count_as_one(caplog: pytest.LogCaptureFixture) -> None:
    reports = reports_on(ManualLoop(), keys_max=2)
    for number in range(10):
        reports.warn(logger, number, "key %d", number)
    reports.close()
    assert [record.getMessage() for record in caplog.records] == [
        "key 0", "key 1", "key 2", "key 9 (7 times since the last report)",
    ]  # fmt: skip
