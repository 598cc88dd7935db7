"""The commands against a running cluster: pipes in and out, forms of output, exit codes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import client_aio
from metadata import build
from tests.support.cli import TIMEOUT_S, Cli

if TYPE_CHECKING:
    from tests.support.cli import RunningCluster

LINES = b"".join(b"line %d\n" % number for number in range(1000))


def _write(cli: Cli, data: bytes = LINES, *arguments: str) -> str:
    return cli.run("ledger", "write", "-", *arguments, stdin=data).decode().strip()


def test_lines_from_a_pipe_come_back_as_they_were(cli: Cli) -> None:
    ledger = _write(cli)
    assert cli.run("ledger", "cat", ledger, "--newline") == LINES
    assert cli.run("ledger", "cat", ledger) == LINES
    assert cli.run("ledger", "cat", ledger, "--no-newline") == LINES.replace(b"\n", b"")


def test_kept_newlines_come_back_without_asking_for_them(cli: Cli) -> None:
    assert cli.run("ledger", "cat", _write(cli, LINES, "--keep-newline")) == LINES


def test_last_line_without_a_newline_is_an_entry(cli: Cli) -> None:
    ledger = _write(cli, b"one\n\nthree")
    assert cli.run("ledger", "cat", ledger, "--newline") == b"one\n\nthree\n"
    assert cli.rows("ledger", "show", ledger)["last_entry"] == 2


def test_binary_file_in_chunks_comes_back_byte_for_byte(cli: Cli, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3_000_001)
    file = tmp_path / "data"
    file.write_bytes(data)
    ledger = cli.run("ledger", "write", str(file), "--chunk-bytes", "65536").decode().strip()
    back = cli.run("ledger", "cat", ledger)
    assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()
    assert cli.rows("ledger", "show", ledger)["length"] == len(data)


def test_empty_input_makes_an_empty_closed_ledger(cli: Cli) -> None:
    ledger = _write(cli, b"")
    assert cli.run("ledger", "cat", ledger) == b""
    shown = cli.rows("ledger", "show", ledger)
    assert (shown["state"], shown["last_entry"]) == ("CLOSED", -1)


def test_cat_reads_a_range(cli: Cli) -> None:
    ledger = _write(cli)
    assert (
        cli.run("ledger", "cat", ledger, "--from", "10", "--to", "11", "--newline") == b"line 10\nline 11\n"
    )


def test_entries_as_json_lines_are_text_or_base64(cli: Cli) -> None:
    ledger = _write(cli, b"text\n\xff\xfe\n")
    rows = [json.loads(line) for line in cli.run("ledger", "cat", ledger, "-o", "jsonl").splitlines()]
    assert rows == [{"entry_id": 0, "text": "text"}, {"entry_id": 1, "base64": "//4="}]


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (("cat", "--from", "998"), [998, 999]),
        (("cat", "--from", "2000"), []),
        (("tail", "-n", "1"), [999]),
        (("tail", "-n", "0"), []),
    ],
)
def test_entries_as_json_are_one_array(cli: Cli, arguments: tuple[str, ...], rows: list[int]) -> None:
    command, *options = arguments
    found = cli.rows("ledger", command, _write(cli), *options)
    assert found == [{"entry_id": entry_id, "text": f"line {entry_id}"} for entry_id in rows]


def test_interrupted_array_is_still_json(cli: Cli) -> None:
    writer, ledger = _start_writing(cli, b"first\n")
    follower = cli.start("ledger", "tail", "-f", ledger, "-o", "json")
    assert follower.stdout is not None
    start = b""
    while b"}" not in start:
        start += follower.stdout.read1()
    follower.send_signal(signal.SIGINT)
    rest, _ = follower.communicate(timeout=TIMEOUT_S)
    assert follower.returncode == 130
    assert json.loads(start + rest) == [{"entry_id": 0, "text": "first"}]
    writer.communicate(timeout=TIMEOUT_S)


def test_tail_shows_the_last_entries(cli: Cli) -> None:
    assert cli.run("ledger", "tail", _write(cli), "-n", "2") == b"line 998\nline 999\n"


def test_following_ends_when_the_ledger_is_closed(cli: Cli) -> None:
    writer, ledger = _start_writing(cli, b"first\n")
    assert writer.stdin is not None
    follower = cli.start("ledger", "tail", "-f", ledger)
    assert follower.stdout is not None
    assert follower.stdout.readline() == b"first\n"
    writer.stdin.write(b"second\n")
    writer.stdin.flush()
    assert follower.stdout.readline() == b"second\n"
    out, _ = writer.communicate(timeout=TIMEOUT_S)
    assert out.decode().strip() == ledger
    rest, _ = follower.communicate(timeout=TIMEOUT_S)
    assert (rest, follower.returncode) == (b"", 0)


def _start_writing(cli: Cli, data: bytes) -> tuple[subprocess.Popen[bytes], str]:
    """Start `ledger write` on a pipe that stays open; gives the process and the ledger's id."""
    writer = cli.start("ledger", "write", "-")
    assert writer.stdin is not None
    assert writer.stderr is not None
    writer.stdin.write(data)
    writer.stdin.flush()
    line = writer.stderr.readline().decode()
    assert line.startswith("writing ledger "), line
    return writer, line.split()[-1]


def test_reader_that_goes_away_leaves_no_traceback(cli: Cli) -> None:
    ledger = _write(cli, b"x" * 100 + b"\n" * 200_000)
    process = cli.start("ledger", "cat", ledger, "--newline")
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    process.stdout = None
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (141, b"")


def test_interrupted_writer_leaves_its_ledger_open_for_recovery(cli: Cli) -> None:
    writer, ledger = _start_writing(cli, LINES)
    follower = cli.start("ledger", "tail", "-f", "-n", "1000", ledger)
    assert follower.stdout is not None
    while follower.stdout.readline() != b"line 999\n":
        pass
    writer.send_signal(signal.SIGINT)
    _, error = writer.communicate(timeout=TIMEOUT_S)
    assert writer.returncode == 130, error.decode()
    assert cli.rows("ledger", "show", ledger)["state"] == "OPEN"
    assert cli.rows("ledger", "recover", ledger)["last_entry"] == 999
    follower.communicate(timeout=TIMEOUT_S)
    assert follower.returncode == 0
    assert cli.run("ledger", "cat", ledger, "--newline") == LINES


def test_created_ledger_is_open_and_listed(cli: Cli) -> None:
    options = ("-e", "3", "-w", "2", "-a", "2", "--custom", "app=demo")
    ledger = cli.rows("ledger", "create", *options)["ledger_id"]
    shown = cli.rows("ledger", "show", str(ledger))
    assert (shown["state"], shown["quorums"], shown["custom"]) == ("OPEN", "E=3 Qw=2 Qa=2", {"app": "demo"})
    assert ledger in [row["ledger_id"] for row in cli.rows("ledger", "list")]
    assert str(ledger) in cli.run("ledger", "list", "--ids").decode().split()
    assert {"ledger_id": ledger} in cli.rows("ledger", "list", "--ids")


def test_table_has_a_line_per_ledger(cli: Cli) -> None:
    ledger = _write(cli)
    line = next(
        line for line in cli.run("ledger", "list").decode().splitlines() if line.split()[:1] == [ledger]
    )
    assert "CLOSED" in line
    assert "999" in line


def test_deleted_ledger_is_not_found(cli: Cli) -> None:
    ledger = _write(cli)
    assert cli.rows("ledger", "delete", ledger) == [{"deleted": int(ledger)}]
    for command in ("show", "cat", "delete", "recover"):
        error = cli.run("ledger", command, ledger, code=3).decode()
        assert ledger in error
        assert len(error.splitlines()) == 1


def test_plain_asyncio_does_as_well(cli: Cli) -> None:
    ledger = _write(cli, LINES, "--loop", "asyncio")
    assert cli.run("ledger", "cat", ledger, "--newline", "--loop", "asyncio") == LINES


def test_bookies_are_listed_with_their_addresses(cli: Cli, cluster: RunningCluster) -> None:
    rows = cli.rows("bookie", "list")
    expected = {row["bookie_id"]: row["addresses"] for row in cluster.document["bookies"]}
    assert {row["bookie_id"]: row["addresses"] for row in rows} == expected
    assert {row["state"] for row in rows} == {"writable"}


def test_bookie_shows_its_figures_by_id_and_by_address(cli: Cli, cluster: RunningCluster) -> None:
    address = cluster.document["bookies"][0]["addresses"][0]
    by_id, by_address = cli.rows("bookie", "info", "b1"), Cli().rows("bookie", "info", address)
    assert by_id.keys() == by_address.keys()
    assert by_id["bookie_id"] == "b1"
    assert (by_id["build"], by_id["interpreter"]) == (build.form(), build.interpreter())


@pytest.mark.parametrize("batch", ["1", "30"])
def test_bench_counts_what_it_wrote(cli: Cli, tmp_path: Path, batch: str) -> None:
    plot = tmp_path / "histogram"
    arguments = ("--entries", "3001", "--ledgers", "2", "--in-flight", "100", "--entry-bytes", "100")
    arguments += ("--batch", batch)
    row = cli.rows("bench", "write", *arguments, "--keep", "--histogram", str(plot))
    assert row["entries"] == 3001
    assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert "Percentile" in plot.read_text()
    ends = [cli.rows("ledger", "show", str(ledger))["last_entry"] for ledger in row["ledger_ids"]]
    assert sorted(ends) == [1499, 1500]
    for mode in ((), ("--random", "--in-flight", "4")):
        read = cli.rows("bench", "read", str(row["ledger_ids"][0]), "--seconds", "1", *mode)
        assert read["entries"] > 0


def test_bench_leaves_no_ledger_behind(cli: Cli) -> None:
    before = cli.run("ledger", "list", "--ids")
    cli.run("bench", "write", "--entries", "100")
    cli.run("bench", "read", "--entries", "100", "--seconds", "0.1")
    assert cli.run("ledger", "list", "--ids") == before


def test_interrupted_bench_leaves_no_ledger_behind(cli: Cli) -> None:
    before = cli.run("ledger", "list", "--ids").split()
    bench = cli.start("bench", "write", "--seconds", "60")
    while not set(cli.run("ledger", "list", "--ids").split()) - set(before):
        assert bench.poll() is None
    bench.send_signal(signal.SIGINT)
    bench.communicate(timeout=TIMEOUT_S)
    assert bench.returncode == 130
    assert cli.run("ledger", "list", "--ids").split() == before


def test_version_and_help() -> None:
    form = f"({build.form()}, {build.interpreter()})"
    assert re.fullmatch(rf"bookie-aio \S+ {re.escape(form)}\n", Cli().run("--version").decode())
    for group in ("cluster", "bookie", "ledger", "bench"):
        assert b"--help" in Cli().run(group, "--help")


def test_shell_completion_is_offered() -> None:
    script = Cli().run("--show-completion", "bash").decode()
    assert "complete" in script


def complete(cli: Cli, line: str) -> list[str]:
    """Return what the shell is offered behind a line."""
    words = line.split(" ")
    shell = {
        "_BOOKIE_AIO_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    script = Path(sys.executable).with_name("bookie-aio")  # the shell completes it by this name
    done = subprocess.run(
        [script], env=cli.environment() | shell, capture_output=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stderr == b""
    return done.stdout.decode().split()


def test_the_shell_completes_ids_and_names(cli: Cli) -> None:
    ledger = _write(cli, LINES)
    cli.run("log", "create", "completed")
    cli.run("ledger", "create", "--unbounded", "completed.too")
    assert complete(cli, "bookie-aio log cat compl") == ["completed"]
    assert "completed" in complete(cli, "bookie-aio log delete ")
    assert "completed" not in complete(cli, "bookie-aio log delete completed ")
    assert ledger in complete(cli, "bookie-aio ledger cat ")
    assert ledger in complete(cli, f"bookie-aio ledger repair {ledger[0]}")
    assert complete(cli, "bookie-aio ledger show completed") == ["completed.too"]
    assert complete(cli, "bookie-aio bookie info b") == ["b1", "b2", "b3"]
    assert complete(cli, f"bookie-aio ledger repair {ledger} --replace b2") == ["b2"]
    assert complete(cli, f"bookie-aio ledger repair {ledger} --with b3") == ["b3"]
    assert "list" in complete(cli, "bookie-aio bookie l")


def test_the_shell_completes_nothing_where_no_store_answers(tmp_path: Path) -> None:
    assert complete(Cli(), "bookie-aio log cat ") == []
    assert complete(Cli(f"sqlite://{tmp_path}/none.db"), "bookie-aio log cat ") == []
    assert list(tmp_path.iterdir()) == []


def test_formatting_gives_a_directory_an_identity(cli: Cli, tmp_path: Path) -> None:
    metadata = f"sqlite://{tmp_path / 'metadata.db'}"
    own = Cli(metadata)
    first = own.rows("bookie", "format", "--new-cluster", "--dir", str(tmp_path / "bookie"))
    assert own.rows("bookie", "format", "--dir", str(tmp_path / "bookie")) == first
    assert [row["state"] for row in own.rows("bookie", "list")] == ["down"]
    # The directory of another cluster is refused, and left as it is.
    cli.run("bookie", "format", "--dir", str(tmp_path / "bookie"), code=1)
    assert own.rows("bookie", "format", "--dir", str(tmp_path / "bookie")) == first


async def test_what_the_command_writes_the_client_reads(cli: Cli) -> None:
    ledger = int(_write(cli))
    assert cli.metadata is not None
    async with client_aio.connect(cli.metadata) as client, client.open_ledger(ledger) as reader:
        entries = [entry.data async for entry in reader.read(0, reader.last_add_confirmed)]
    assert entries == LINES.splitlines()


@pytest.mark.parametrize(("keys", "code"), [(b"y\n", 0), (b"n\n", 1), (b"\x04", 1), (b"\x03", 130)])
def test_a_deletion_is_asked_for_on_a_terminal(cli: Cli, keys: bytes, code: int) -> None:
    ledger_id = cli.run("ledger", "write", "-", stdin=b"a\n").decode().strip()
    ours, theirs = pty.openpty()
    try:
        process = cli.start(
            "ledger", "delete", ledger_id, stdin=theirs, start_new_session=True, preexec_fn=own_terminal
        )
        assert process.stderr is not None
        asked = b""
        while b"[y/N]" not in asked:
            asked += os.read(process.stderr.fileno(), 1000)
        os.write(ours, keys)
        process.communicate(timeout=TIMEOUT_S)
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == code
    cli.run("ledger", "show", ledger_id, code=3 if code == 0 else 0)


def own_terminal() -> None:
    """Make standard input the terminal of the session, so that its keys are signals."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
