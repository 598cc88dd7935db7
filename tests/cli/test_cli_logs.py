"""`bookie-aio log` as a user runs it."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from client_aio.cli.text import draw_log, link_of
from client_aio.log.takeover import LogMetadata
from metadata.model.ledger import LedgerMetadata
from metadata.model.log import LogRow, Position
from tests.support.cli import TIMEOUT_S

if TYPE_CHECKING:
    from tests.support.cli import Cli

LINES = b"".join(b"line %d\n" % number for number in range(1000))


def test_lines_from_a_pipe_are_appended_and_come_back(cli: Cli) -> None:
    first = cli.run("log", "append", "pipe", "--custom", "app=demo", stdin=LINES).decode().strip()
    second = cli.run("log", "append", "pipe", "-", stdin=b"one more").decode().strip()
    assert Position.parse(second) > Position.parse(first)
    assert cli.run("log", "cat", "pipe") == LINES + b"one more\n"
    assert cli.run("log", "cat", "pipe", "--no-newline", "--from", first) == b"line 999one more"
    assert cli.run("log", "tail", "pipe", "-n", "2") == b"line 999\none more\n"
    assert cli.run("log", "tail", "pipe", "-n", "0") == b""
    rows = [
        json.loads(line) for line in cli.run("log", "tail", "pipe", "-n", "1", "-o", "jsonl").splitlines()
    ]
    assert rows == [{"position": second, "text": "one more"}]
    assert "pipe" in cli.run("log", "list", "--names").decode().split()
    shown = cli.rows("log", "show", "pipe")
    assert [link["entries"] for link in shown["chain"]] == [1000, 1]
    assert shown["custom"] == {"app": "demo"}
    text = cli.run("log", "show", "pipe").decode()
    assert "2 ledgers" in text
    assert "CLOSED" in text


def test_each_record_is_printed_as_it_was_cut(cli: Cli) -> None:
    """The ledger says how: one log may have records that were lines, and others that were not."""
    cli.run("log", "append", "mixed", stdin=b"a line\nanother\n")
    cli.run("log", "append", "mixed", "--chunk-bytes", "3", stdin=b"pieces\n")
    cli.run("log", "append", "mixed", "--keep-newline", stdin=b"kept\n")
    assert cli.run("log", "cat", "mixed") == b"a line\nanother\npieces\nkept\n"
    assert cli.run("log", "cat", "mixed", "--newline") == b"a line\nanother\npie\nces\n\n\nkept\n\n"


def test_a_log_is_rolled_truncated_and_deleted(cli: Cli) -> None:
    for number in range(4):
        cli.run("log", "append", "cut", "--keep-newline", stdin=b"%d\n" % number)
    ids = [link["id"] for link in cli.rows("log", "show", "cut")["chain"]]
    assert cli.rows("log", "truncate", "cut", "--before", f"{ids[2]}:0") == {
        "log": "cut", "begins_at": f"{ids[1]}:1", "deleted": ids[:2],
    }  # fmt: skip
    assert cli.run("log", "cat", "cut") == b"2\n3\n"
    assert b"begins at" in cli.run("log", "cat", "cut", "--from", f"{ids[0]}:0", code=3)
    assert cli.rows("log", "delete", "cut") == [{"deleted": "cut"}]
    assert b"there is no log 'cut'" in cli.run("log", "cat", "cut", code=3)
    assert b"no position" in cli.run("log", "truncate", "cut", "--before", "7", code=2)
    assert b"not legal" in cli.run("log", "append", "a/b", code=2)
    assert cli.rows("log", "sweep") == {"ledgers": [], "pages": [], "failures": []}


def test_tail_follows_a_log_over_its_writers_until_it_is_interrupted(cli: Cli) -> None:
    cli.run("log", "append", "followed", stdin=b"1\n")
    process = cli.start("log", "tail", "-f", "followed")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        for number in range(2, 5):
            cli.run("log", "append", "followed", stdin=b"%d\n" % number)
            assert process.stdout.readline() == b"%d\n" % number
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


def test_a_ledger_that_a_log_lists_is_deleted_by_force_only_and_leaves_a_gap(cli: Cli) -> None:
    assert cli.rows("log", "create", "gaps", "--custom", "app=demo") == {"log": "gaps"}
    assert b"already" in cli.run("log", "create", "gaps", code=1)
    for number in range(3):
        cli.run("log", "append", "gaps", "--keep-newline", stdin=b"%d\n" % number)
    ids = [str(link["ledger_id"]) for link in cli.rows("log", "show", "gaps")["chain"]]
    assert cli.rows("ledger", "show", ids[1])["log"] == "gaps"
    assert b"--force" in cli.run("ledger", "delete", ids[1], code=1)
    cli.run("ledger", "delete", ids[1], "--force")
    assert b"there is no ledger" in cli.run("log", "cat", "gaps", code=3)
    process = cli.start("log", "cat", "gaps", "--on-gap", "skip")
    out, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (5, b"0\n2\n")
    assert f"gap from {ids[1]}:0 to the end of that ledger".encode() in error
    process = cli.start("log", "cat", "gaps", "--on-gap", "skip", "-o", "jsonl")
    out, _ = process.communicate(timeout=TIMEOUT_S)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row.get("text", row.get("gap", {}).get("first")) for row in rows] == ["0\n", f"{ids[1]}:0", "2\n"]


def test_tail_waits_for_a_log(cli: Cli) -> None:
    process = cli.start("log", "tail", "-f", "--wait", "later")
    try:
        cli.run("log", "append", "later", stdin=b"1\n")
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


def test_a_loss_is_accepted_only_where_there_is_one(cli: Cli) -> None:
    ledger_id = str(cli.rows("ledger", "write", "-")["ledger_id"])
    recovered = cli.rows("ledger", "recover", ledger_id, "--accept-loss", "--yes")
    assert recovered == {
        "ledger_id": int(ledger_id),
        "last_entry": -1,
        "length": 0,
        "given_up": None,
        "below_write_quorum_from": None,
    }


def test_append_says_that_it_takes_the_log_over(cli: Cli) -> None:
    assert "TAKES THE LOG OVER" in " ".join(cli.run("log", "append", "--help").decode().split())


@pytest.mark.parametrize("shown", [3, 1])
def test_the_chain_is_drawn(shown: int) -> None:
    def ledger(ledger_id: int) -> LedgerMetadata:
        return LedgerMetadata.new(
            ledger_id, ensemble_size=2, write_quorum=2, ack_quorum=1, bookies=["b1", "b2"]
        )

    rows = (LogRow(7, 7, 0), LogRow(9, 8, 60_000), LogRow(10, 10, 120_000))
    changed = ledger(7).change_ensemble(500, ["b1", "b3"]).close(999, 1_000_000)
    ledgers = [changed, None, ledger(10)]
    metadata = LogMetadata("orders", 0, rows, Position(7, 3), {"app": b"demo"}, {"q": 4})
    links = [link_of(row, each) for row, each in zip(rows, ledgers, strict=True)]
    text = draw_log(metadata, links[-shown:])
    assert text.splitlines()[:3] == [
        "log orders  3 ledgers, begins at 7:3",
        "custom app = b'demo'",
        "query q: batch 4",
    ]
    chain = text.splitlines()[4:]
    if shown == 3:
        assert [line[0] for line in chain[1:]] == ["┬", "├", "└"]
        assert "CLOSED    1,000  1,000,000  b1 b2 → b1 b3  1970-01-01T00:00:00+00:00" in chain[1]
        assert "9=8  GONE" in chain[2]
    else:
        assert [line[0] for line in chain[1:]] == ["┬", "└"]
        assert "2 more" in chain[1]
    assert "10  OPEN" in chain[-1]
    assert draw_log(LogMetadata("a", 0, (), Position(0, 0), {}, {}), []) == "log a  0 ledgers, begins at 0:0"
