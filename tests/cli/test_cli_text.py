"""How commands draw, cut, count and describe."""

from __future__ import annotations

import random
import sqlite3
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_aio.admin.repair import RepairedFragment, RepairReport
from client_aio.admin.replicas import Replica
from client_aio.autorecovery.survey import AutoRecoveryState, BookieReport, ClusterSurvey
from client_aio.cli.bench import LatencyBuckets, take_oldest
from client_aio.cli.exit_codes import Exit, describe, exit_code_of
from client_aio.cli.input import cut, read_batches
from client_aio.cli.text import (
    custom_of,
    draw_ledger,
    draw_replicas,
    entries_text,
    ledger_row,
    survey_text,
    text_of,
    text_of_repair,
)
from client_aio.core.audit import Condition, Problem
from metadata import errors
from metadata.access.repair_tasks import RepairTask, TaskRef, WorkerRecord
from metadata.backends.sqlite.database import translated
from metadata.model.ledger import LedgerMetadata

if TYPE_CHECKING:
    from pathlib import Path


def _ledger() -> LedgerMetadata:
    return LedgerMetadata.new(
        7,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        bookies=["b1", "b2", "b3"],
        created_ms=1_790_000_000_000,
    )


def test_drawing_shows_each_fragment_its_share_and_who_was_replaced() -> None:
    closed = _ledger().change_ensemble(100, ["b1", "b4", "b3"]).close(299, 30_000)
    assert draw_ledger(closed).splitlines() == [
        "ledger 7  CLOSED  E=3 Qw=3 Qa=2  crc32c",
        "entries 0–299, 30,000 bytes",
        "",
        "fragment  entries  bookies",
        "       0  0–99     b1  b2  b3  ██████████",
        "       1  100–299  b1  b4  b3            ██████████████████████",
        "                       ^^",
    ]


def test_replicas_are_numbered_by_fragments_wherever_those_stand() -> None:
    replicas = [
        Replica("b1", 7000, 5, 0, False, ""),
        Replica("b12345678", 7000, 5, 2, True, ""),
        Replica("b1", 7005, None, None, False, ""),
        Replica("b2", 7005, None, None, False, "gone"),
    ]
    assert draw_replicas(replicas).splitlines() == [
        "fragment  from entry  bookie     holds",
        "       0       7,000  b1         all 5 entries",
        "       0       7,000  b12345678  2 of 5 entries are missing; it lost data of this ledger",
        "       1       7,005  b1         what it has acknowledged so far",
        "       1       7,005  b2         not known: gone",
    ]


def test_drawing_of_an_open_ledger_has_no_end() -> None:
    assert draw_ledger(_ledger()).splitlines()[-1] == "       0  0–…      b1  b2  b3"


def test_drawing_of_an_empty_ledger_says_so() -> None:
    text = draw_ledger(_ledger().close(-1, 0))
    assert "no entries" in text
    assert text.splitlines()[-1] == "       0  none     b1  b2  b3"


def test_a_run_without_entries_is_named_as_such() -> None:
    assert entries_text(0, 999) == "entries 0–999"
    assert entries_text(3, 3) == "entries 3–3"
    assert entries_text(3, 2) == "no entries"
    assert entries_text(0, -1) == "no entries"


def test_repair_of_an_empty_ledger_says_so() -> None:
    report = RepairReport(7, "b1", (RepairedFragment(0, -1, "b4", 0, 0),), False, False)
    assert text_of_repair(report) == "ledger 7: no entries: b1 replaced by b4, 0 entries (0 bytes) copied"


def test_repair_says_of_each_line_which_ledger_it_is_of() -> None:
    fragments = (RepairedFragment(0, 4, "b4", 5, 500), RepairedFragment(9, 9, "b1", 0, 0))
    report = RepairReport(7, "b1", fragments, True, True)
    lines = text_of_repair(report).splitlines()
    assert len(lines) == 4
    assert all(line.startswith("ledger 7: ") for line in lines)
    assert text_of_repair(RepairReport(7, "b1", (), False, False)) == "ledger 7: b1 is in no fragment"


def test_repair_names_the_way_out_of_a_last_fragment() -> None:
    report = RepairReport(7, "b1", (), False, True)
    assert "--recover-after closes the ledger" in text_of_repair(report)
    assert "ledger takeover" in text_of_repair(report, is_unbounded=True)
    assert "--recover-after" not in text_of_repair(report, is_unbounded=True)


def test_repair_says_what_became_of_a_mark_of_lost_data() -> None:
    fragments = (RepairedFragment(0, 4, "b1", 5, 500),)
    report = RepairReport(7, "b1", fragments, False, False, is_mark_lifted=True)
    assert text_of_repair(report).endswith("b1 has all that it owes again: its mark of lost data was lifted")
    report = RepairReport(7, "b1", fragments, False, False, mark_left="it is OPEN")
    assert text_of_repair(report).endswith("b1 keeps its mark of lost data: it is OPEN")


def test_drawing_shows_custom_metadata() -> None:
    assert "custom app = b'demo'" in draw_ledger(replace(_ledger(), custom={"app": b"demo"}))


def test_row_names_the_time_of_creation() -> None:
    assert ledger_row(_ledger())["created"] == "2026-09-21T14:13:20+00:00"


def test_custom_metadata_is_key_and_value() -> None:
    assert custom_of(["a=1", "b=x=y", "c="]) == {"a": b"1", "b": b"x=y", "c": b""}
    assert custom_of(["a=\udcff"]) == {"a": b"\xff"}, "the bytes of the command line"
    for wrong in ("a", "=1"):
        with pytest.raises(errors.InvalidArgumentError, match="KEY=VALUE"):
            custom_of([wrong])


def test_bytes_that_are_no_text_are_shown_in_base64() -> None:
    assert text_of("grün".encode()) == {"text": "grün"}
    assert text_of(b"\xff\x00") == {"base64": "/wA="}


@given(st.binary(max_size=200), st.integers(1, 50), st.booleans())
def test_cutting_loses_nothing(data: bytes, size: int, keep: bool) -> None:
    chunks, rest = cut(data, size, keep)
    assert b"".join([*chunks, rest]) == data
    assert all(len(chunk) == size for chunk in chunks)
    assert len(rest) < size
    lines, rest = cut(data, None, keep)
    assert b"".join(line if keep else line + b"\n" for line in lines) + rest == data
    assert b"\n" not in rest


async def test_an_input_without_newlines_is_not_held_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(20 * 2**20)
    sizes = [len(entry) async for batch in read_batches(str(path), None, False) for entry in batch]
    assert sizes == [8 * 2**20, 8 * 2**20, 4 * 2**20]
    sizes = [len(entry) async for batch in read_batches(str(path), 3_000_000, False) for entry in batch]
    assert sizes == [3_000_000] * 6 + [20 * 2**20 - 18_000_000]


def test_percentiles_are_within_two_percent() -> None:
    rng = random.Random(1)
    values = sorted(rng.lognormvariate(-7, 1.5) for _ in range(20_000))
    buckets = LatencyBuckets()
    for value in values:
        buckets.record(value)
    for percent in (50, 90, 99, 99.9):
        exact = values[int(len(values) * percent / 100) - 1]
        assert buckets.percentile(percent) == pytest.approx(exact, rel=0.025)
    assert buckets.percentile(100) == values[-1]


def test_a_count_weighs_as_much_as_that_many_values() -> None:
    buckets = LatencyBuckets()
    buckets.record(0.001, 99)
    buckets.record(1.0)
    assert buckets.percentile(99) == pytest.approx(0.001, rel=0.025)
    assert buckets.percentile(99.5) == 1.0


def test_acknowledged_entries_are_taken_off_the_oldest_bursts() -> None:
    bursts = deque([(3, 1.0), (2, 2.0), (4, 3.0)])
    assert list(take_oldest(bursts, 0)) == []
    assert list(take_oldest(bursts, 4)) == [(3, 1.0), (1, 2.0)]
    assert list(take_oldest(bursts, 1)) == [(1, 2.0)]
    assert list(bursts) == [(4, 3.0)]


def test_percentiles_without_values_are_zero() -> None:
    assert LatencyBuckets().percentile(99) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgumentError("x"), Exit.USAGE),
        (errors.EntryTooLargeError("x"), Exit.USAGE),
        (errors.NoSuchLedgerError("x"), Exit.NOT_FOUND),
        (errors.NotEnoughBookiesError("x"), Exit.UNAVAILABLE),
        (errors.MetadataUnavailableError("x"), Exit.UNAVAILABLE),
        (errors.OperationTimeoutError("x"), Exit.UNAVAILABLE),
        (errors.LedgerRecoveryError("x"), Exit.UNAVAILABLE),
        (errors.DigestMismatchError("x"), Exit.DAMAGED),
        (errors.CorruptRecordError("x"), Exit.DAMAGED),
        (errors.LedgerFencedError("x"), Exit.FAILURE),
        (OSError(28, "No space left on device"), Exit.FAILURE),
        (ZeroDivisionError(), Exit.FAILURE),
    ],
)
def test_exit_code_says_what_kind_of_failure(error: Exception, code: Exit) -> None:
    assert exit_code_of(error) is code


def test_error_is_one_line_whatever_it_says() -> None:
    assert describe(errors.BookKeeperError("first\nsecond")) == r"first\nsecond"
    assert describe(OSError("first\n  second")) == "first second"
    assert describe(ZeroDivisionError("division by zero")) == "ZeroDivisionError: division by zero"
    assert describe(KeyError()) == "KeyError"


NO_ANSWER = "is the metadata store running"


def test_a_full_disk_is_no_store_that_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(errors.MetadataUnavailableError) as full, translated(path):
        connection.execute("CREATE TABLE one (x)")
    connection.close()
    assert "no space left" in describe(full.value)
    assert NO_ANSWER not in describe(full.value)
    locking = errors.MetadataUnavailableError("no lock")
    locking.__cause__ = OSError(28, "No space left on device")
    assert NO_ANSWER not in describe(locking)
    locking.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert NO_ANSWER in describe(locking)


def test_what_the_library_names_is_told_as_a_command() -> None:
    text = describe(
        errors.InvalidArgumentError("taken over by open_unbounded_ledger, or accept_loss seals it")
    )
    assert "open_unbounded_ledger is `bookie-aio ledger takeover`" in text
    assert "accept_loss is `bookie-aio ledger recover --accept-loss`" in text
    assert "takeover" not in describe(errors.InvalidArgumentError("my_accept_loss_s is wrong"))


def _survey(told: str) -> ClusterSurvey:
    ref = TaskRef(copies=1, ledger_id=7, token="t")
    task = RepairTask(reasons={}, since_ms=0, attempts=3, error=told)
    return ClusterSurvey(
        bookies=[BookieReport(bookie_id="b1", state="up", rack=told)],
        ledgers={"OPEN": 1},
        under_replicated={},
        growing_on_down=0,
        absent=0,
        given_up=0,
        unreadable=0,
        auto_recovery=AutoRecoveryState(
            auditor=told,
            workers=[WorkerRecord(name=told, ledger_id=7)],
            refs=[ref],
            tasks=[(ref, task)],
        ),
        problems=[Problem(Condition.DEGRADED, told)],
    )


@pytest.mark.parametrize("told", ["x\nbookie b9: up, 0 ledgers", "\x1b[2J", "\u2028", "\x85", "\u202e"])
def test_no_text_of_others_forges_a_line_of_the_cluster_status(told: str) -> None:
    plain, hostile = survey_text(_survey("plain")), survey_text(_survey(told))
    assert len(hostile.split("\n")) == len(plain.split("\n"))
    assert told not in hostile
