"""The commands against a running cluster: pipes in and out, forms of output, exit codes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import client_aio
from tests.support.cli import TIMEOUT_S, Cli

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cli import RunningCluster

LINES = b"".join(b"line %d\n" % number for number in range(1000))


def _write(cli: Cli, data: bytes = LINES, *arguments: str) -> str:
    return cli.run("ledger", "write", "-", *arguments, stdin=data).decode().strip()


def test_lines_from_a_pipe_come_back_as_they_were(cli: Cli) -> None:
    ledger = _write(cli)
    assert cli.run("ledger", "cat", ledger, "--newline") == LINES
    assert cli.run("ledger", "cat", ledger) == LINES.replace(b"\n", b"")


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


def test_tail_shows_the_last_entries(cli: Cli) -> None:
    assert cli.run("ledger", "tail", _write(cli), "-n", "2") == b"line 998\nline 999\n"


async def test_following_ends_when_the_ledger_is_closed(cli: Cli) -> None:
    writer = cli.start("ledger", "write", "-", "--custom", "test=follow")
    assert writer.stdin is not None
    writer.stdin.write(b"first\n")
    writer.stdin.flush()
    ledger = await _wait_for_custom(cli, b"follow")
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


async def _wait_for_custom(cli: Cli, value: bytes) -> str:
    """Find a ledger while it is being written, when its id is not printed yet: by its custom metadata."""
    assert cli.metadata is not None
    async with asyncio.timeout(TIMEOUT_S), client_aio.connect(cli.metadata) as client:
        while True:
            async for ledger_id in client.list_ledgers():
                if (await client.ledger_metadata(ledger_id)).custom.get("test") == value:
                    return str(ledger_id)


def test_reader_that_goes_away_leaves_no_traceback(cli: Cli) -> None:
    ledger = _write(cli, b"x" * 100 + b"\n" * 200_000)
    process = cli.start("ledger", "cat", ledger, "--newline")
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    process.stdout = None
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (141, b"")


async def test_interrupted_writer_leaves_its_ledger_open_for_recovery(cli: Cli) -> None:
    writer = cli.start("ledger", "write", "-", "--custom", "test=interrupted")
    assert writer.stdin is not None
    writer.stdin.write(LINES)
    writer.stdin.flush()
    ledger = await _wait_for_custom(cli, b"interrupted")
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


def test_table_has_a_line_per_ledger(cli: Cli) -> None:
    ledger = _write(cli)
    line = next(
        line for line in cli.run("ledger", "list").decode().splitlines() if line.split()[:1] == [ledger]
    )
    assert "CLOSED" in line
    assert "999" in line


def test_deleted_ledger_is_not_found(cli: Cli) -> None:
    ledger = _write(cli)
    cli.run("ledger", "delete", ledger)
    for command in ("show", "cat", "delete", "recover"):
        error = cli.run("ledger", command, ledger, code=3).decode()
        assert ledger in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("-e", "2", "-w", "3"), "ensemble_size 2 is below write_quorum 3"),
        (("-w", "2", "-a", "3"), "write_quorum 2 is below ack_quorum 3"),
        (("--custom", "novalue"), "KEY=VALUE"),
        (("--digest", "md5"), "md5"),
    ],
)
def test_wrong_arguments_are_named(cli: Cli, arguments: tuple[str, ...], what: str) -> None:
    assert what in cli.run("ledger", "create", *arguments, code=2).decode()


def test_more_bookies_than_there_are_is_unavailable(cli: Cli) -> None:
    error = cli.run("ledger", "create", "-e", "4", code=4).decode()
    assert "4" in error
    assert "bookie list" in error


def test_missing_file_is_named(cli: Cli) -> None:
    assert "/nowhere/at/all" in cli.run("ledger", "write", "/nowhere/at/all", code=2).decode()


def test_without_a_metadata_store_it_says_how_to_name_one() -> None:
    assert "--metadata" in Cli().run("ledger", "list", code=2).decode()


@pytest.mark.parametrize("uri", ["ftp://x/y", "sqlite://relative/path", "zk://"])
def test_wrong_uri_is_shown_with_what_is_expected(uri: str) -> None:
    assert "sqlite:///absolute/path" in Cli(uri).run("ledger", "list", code=2).decode()


def test_reading_makes_no_store_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "typo.db"
    assert str(path) in Cli(f"sqlite://{path}").run("ledger", "list", code=4).decode()
    assert not path.exists()


def test_traceback_is_shown_only_when_asked_for(cli: Cli) -> None:
    assert "Traceback" not in cli.run("ledger", "show", "999999", code=3).decode()
    assert "Traceback" in cli.run("ledger", "show", "999999", "--debug", code=3).decode()


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


def test_bookie_that_does_not_run_is_unavailable(cli: Cli) -> None:
    assert "b9" in cli.run("bookie", "info", "b9", code=4).decode()
    assert "127.0.0.1:1" in Cli().run("bookie", "info", "127.0.0.1:1", code=4).decode()


def test_bench_counts_what_it_wrote(cli: Cli, tmp_path: Path) -> None:
    plot = tmp_path / "histogram"
    arguments = ("--entries", "3001", "--ledgers", "2", "--in-flight", "100", "--entry-bytes", "100")
    row = cli.rows("bench", "write", *arguments, "--keep", "--histogram", str(plot))
    assert row["entries"] == 3001
    assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert "Percentile" in plot.read_text()
    ends = [cli.rows("ledger", "show", str(ledger))["last_entry"] for ledger in row["ledger_ids"]]
    assert sorted(ends) == [1499, 1500]
    for mode in ((), ("--random", "--in-flight", "4")):
        read = cli.rows("bench", "read", str(row["ledger_ids"][0]), "--seconds", "0.3", *mode)
        assert read["entries"] > 0


def test_bench_leaves_no_ledger_behind(cli: Cli) -> None:
    before = cli.run("ledger", "list", "--ids")
    cli.run("bench", "write", "--entries", "100")
    cli.run("bench", "read", "--entries", "100", "--seconds", "0.1")
    assert cli.run("ledger", "list", "--ids") == before


def test_version_and_help() -> None:
    assert Cli().run("--version").decode().startswith("bookie-aio ")
    for group in ("cluster", "bookie", "ledger", "bench"):
        assert b"--help" in Cli().run(group, "--help")


def test_shell_completion_is_offered() -> None:
    script = Cli().run("--show-completion", "bash").decode()
    assert "complete" in script


async def test_bookie_on_a_known_id_with_an_empty_directory_is_refused(cli: Cli, tmp_path: Path) -> None:
    arguments = ("bookie", "serve", "--id", "b1", "--dir", str(tmp_path / "empty"), "--listen", "127.0.0.1:0")
    error = cli.run(*arguments, code=1).decode()
    assert "b1" in error.splitlines()[-1]
    assert not (tmp_path / "empty").exists()


def test_formatting_gives_a_directory_an_identity(cli: Cli, tmp_path: Path) -> None:
    metadata = f"sqlite://{tmp_path / 'metadata.db'}"
    own = Cli(metadata)
    first = own.rows("bookie", "format", "--dir", str(tmp_path / "bookie"))
    assert own.rows("bookie", "format", "--dir", str(tmp_path / "bookie")) == first
    assert [row["state"] for row in own.rows("bookie", "list")] == ["down"]
    # The directory of another cluster is refused, and left as it is.
    cli.run("bookie", "format", "--dir", str(tmp_path / "bookie"), code=1)
    assert own.rows("bookie", "format", "--dir", str(tmp_path / "bookie")) == first


def test_listening_for_everybody_needs_to_be_said(cli: Cli, tmp_path: Path) -> None:
    error = cli.run("bookie", "serve", "--dir", str(tmp_path / "b"), "--listen", "0.0.0.0:0", code=2)
    assert b"authentication" in error
    assert not (tmp_path / "b").exists()


async def test_what_the_command_writes_the_client_reads(cli: Cli) -> None:
    ledger = int(_write(cli))
    assert cli.metadata is not None
    async with client_aio.connect(cli.metadata) as client, client.open_ledger(ledger) as reader:
        entries = [entry.data async for entry in reader.read(0, reader.last_add_confirmed)]
    assert entries == LINES.splitlines()


def test_quickstart_runs(cli: Cli) -> None:
    assert cli.metadata is not None
    done = subprocess.run(
        [sys.executable, "examples/quickstart.py", cli.metadata],
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"entries 0 to 999" in done.stdout
