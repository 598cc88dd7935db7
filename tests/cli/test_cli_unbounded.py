"""Unbounded ledgers on the command line: made, taken over, written, read, shown, sealed, deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.cli import Cli

OK, FAILURE, USAGE, NOT_FOUND = 0, 1, 2, 3


def test_an_unbounded_ledger_from_its_making_to_its_end(cli: Cli) -> None:
    made = cli.run("ledger", "create", "--unbounded", "payments").decode().strip()
    assert made.isdecimal()
    assert b"exists already" in cli.run("ledger", "create", "--unbounded", "payments", code=FAILURE)
    for number, lines in enumerate((b"a\nb\n", b"c\n"), 1):
        taken = cli.rows("ledger", "takeover", "payments", "-")  # nothing on standard input
        assert taken["term"] == 2 * number - 1
        if number == 1:
            assert taken["last_entry"] == -1
        text = cli.run("ledger", "takeover", "payments", "-", stdin=lines).decode()
        assert f"term {2 * number}" in text
    assert cli.run("ledger", "cat", "payments", "--newline") == b"a\nb\nc\n"
    assert cli.run("ledger", "cat", made, "--from", "1", "--newline") == b"b\nc\n"
    assert cli.run("ledger", "tail", "payments", "-n", "1") == b"c\n"

    shown = cli.rows("ledger", "show", "payments")
    assert (shown["name"], shown["term"], shown["first_entry"]) == ("payments", 4, 0)
    assert [fragment["content_term"] for fragment in shown["fragments"]] == [2, 4]
    drawn = cli.run("ledger", "show", made).decode()
    assert "unbounded  payments  term 4" in drawn
    assert "payments" in cli.run("ledger", "list").decode()

    assert b"`bookie-aio ledger takeover`" in cli.run("ledger", "recover", made, code=USAGE)
    assert cli.run("ledger", "trim", made, "1").decode() == f"ledger {made} begins at entry 0\n"
    trimmed = cli.rows("ledger", "takeover", "payments", "--trim-before", "2")
    assert trimmed == {"ledger": "payments", "first_entry": 2}
    assert cli.rows("ledger", "show", "payments")["term"] == 4  # Trimming took nothing over.
    sealed = cli.rows("ledger", "takeover", made, "--trim-before", "2", "--seal")
    assert (sealed["first_entry"], sealed["last_entry"], sealed["sealed"]) == (2, 2, True)
    assert cli.run("ledger", "tail", "-f", "payments") == b"c\n"
    assert b"begins at entry 2" in cli.run("ledger", "cat", "payments", "--from", "0", code=NOT_FOUND)
    assert b"sealed" in cli.run("ledger", "takeover", "payments", code=FAILURE)
    assert b"sealed" in cli.run("ledger", "trim", "payments", "3", code=FAILURE)

    assert cli.run("ledger", "delete", "--yes", "payments").decode() == "deleted payments\n"
    assert b"payments" in cli.run("ledger", "show", "payments", code=NOT_FOUND)
    assert b"payments" in cli.run("ledger", "takeover", "payments", code=NOT_FOUND)


def test_a_takeover_of_what_holds_nothing_says_so(cli: Cli) -> None:
    made = cli.run("ledger", "create", "--unbounded", "nothing-yet").decode().strip()
    text = cli.run("ledger", "takeover", "nothing-yet").decode()
    assert text == f"ledger {made}, term 1: no entries\n"
    text = cli.run("ledger", "takeover", "nothing-yet", "-", stdin=b"a\nb\n").decode()
    assert text == f"ledger {made}, term 2: entries 0–1\n"


def test_a_bounded_ledger_is_not_taken_over(cli: Cli) -> None:
    ledger = cli.run("ledger", "write", "-", stdin=b"a\n").decode().strip()
    assert b"bounded" in cli.run("ledger", "takeover", ledger, code=USAGE)
    assert b"not legal" in cli.run("ledger", "show", "no/name", code=USAGE)
