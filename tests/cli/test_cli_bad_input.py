"""What is wrong with the input, the cluster or the data is said in one line, with a documented exit code."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from client_aio.spark.commits import sweep_orphans
from metadata.access.ledgers import LedgerStore
from metadata.backends.uri import open_store
from metadata.errors import InvalidArgumentError
from metadata.ids import ledger_key
from metadata.model.ledger import LedgerMetadata
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENTRY_BYTES_MAX = 4 * 1024 * 1024


def refusal(cli: Cli, *arguments: str, code: int, stdin: bytes = b"") -> str:
    """Run a command that fails with that exit code; gives the one line that says why."""
    error = cli.run(*arguments, stdin=stdin, code=code).decode()
    (line,) = [line for line in error.splitlines() if not _is_log(line)]
    assert line.startswith("bookie-aio: ")
    return line


def _is_log(line: str) -> bool:
    """Tell a bookie's log, and what `ledger write` says first, from the reason."""
    return line[:4].isdecimal() or line.startswith(("writing ledger ", "bookie="))


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("-e", "2", "-w", "3"), "ensemble_size 2 is below write_quorum 3"),
        (("-w", "2", "-a", "3"), "write_quorum 2 is below ack_quorum 3"),
        (("-a", "0"), "--ack-quorum"),
        (("-e", "many"), "--ensemble"),
        (("--custom", "novalue"), "KEY=VALUE"),
        (("--digest", "md5"), "md5"),
        (("--nonsense",), "--nonsense"),
        (("-o", "xml"), "xml"),
    ],
)
def test_wrong_arguments_are_named(cli: Cli, arguments: tuple[str, ...], what: str) -> None:
    assert what in refusal(cli, "ledger", "create", *arguments, code=2)


def test_more_bookies_than_there_are_is_unavailable(cli: Cli) -> None:
    error = refusal(cli, "ledger", "create", "-e", "4", code=4)
    assert "4 bookies" in error
    assert "bookie list" in error


@pytest.mark.parametrize("options", [(), ("--chunk-bytes", str(ENTRY_BYTES_MAX + 1))])
def test_entry_above_the_limit_is_told_with_the_limit(cli: Cli, options: tuple[str, ...]) -> None:
    data = bytes(ENTRY_BYTES_MAX + 1)
    error = refusal(cli, "ledger", "write", "-", *options, stdin=data, code=2)
    assert "4,194,305" in error
    assert "4,194,304" in error


def test_missing_file_is_named(cli: Cli, tmp_path: Path) -> None:
    for path in ("/nowhere/at/all", str(tmp_path)):
        assert path in refusal(cli, "ledger", "write", path, code=2)


def test_an_input_is_looked_at_before_a_ledger_is_made_or_taken_over(cli: Cli) -> None:
    cli.run("ledger", "create", "--unbounded", "looked-at")
    before = cli.run("ledger", "list", "-o", "json")
    assert "/nowhere" in refusal(cli, "ledger", "takeover", "looked-at", "/nowhere", code=2)
    assert "/nowhere" in refusal(cli, "log", "append", "never-made", "/nowhere", code=2)
    for command in (("ledger", "write"), ("log", "append", "never-made")):
        error = refusal(cli, *command, "-", "--chunk-bytes", str(ENTRY_BYTES_MAX + 1), code=2)
        assert "--chunk-bytes 4,194,305 is above the limit" in error
    assert cli.run("ledger", "list", "-o", "json") == before
    assert "never-made" not in cli.run("log", "list", "--names").decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ("log", "sweep", "--older-than", "nan"),
        ("ledger", "repair", "7", "--replace", "b1", "--recover-after", "inf"),
        ("bookie", "serve", "--dir", "/nowhere", "--weight", "nan"),
    ],
)
def test_numbers_are_finite(arguments: tuple[str, ...]) -> None:
    assert f"{' '.join(arguments[-2:])} is not a finite number" in refusal(Cli(), *arguments, code=2)


def test_a_dry_run_takes_no_order_back(cli: Cli) -> None:
    assert "--dry-run changes nothing" in refusal(
        cli, "bookie", "decommission", "b1", "--cancel", "--dry-run", code=2
    )


def test_an_id_that_no_ledger_has_is_wrong_usage(cli: Cli) -> None:
    assert "above the highest one" in refusal(cli, "ledger", "show", "9" * 5000, code=2)
    assert "'\u0661'" in refusal(cli, "ledger", "show", "\u0661", code=2), "not the ledger 1"


def test_range_beyond_the_end_is_told_with_the_end(cli: Cli) -> None:
    ledger = cli.run("ledger", "write", "-", stdin=b"1\n2\n3\n").decode().strip()
    assert "confirmed, 2" in refusal(cli, "ledger", "cat", ledger, "--to", "3", code=3)
    assert "2 to 0" in refusal(cli, "ledger", "cat", ledger, "--from", "2", "--to", "0", code=2)


def test_traceback_is_shown_only_when_asked_for(cli: Cli) -> None:
    assert "999999" in refusal(cli, "ledger", "show", "999999", code=3)
    assert "Traceback" in cli.run("ledger", "show", "999999", "--debug", code=3).decode()


def test_an_argument_that_is_no_utf_8_is_kept_or_refused(cli: Cli) -> None:
    ledger = cli.run("ledger", "create", "--custom", b"a=\xff").decode().strip()
    assert cli.rows("ledger", "show", ledger)["custom"] == {"a": "/w=="}
    cli.run("log", "create", "of-bytes", "--custom", b"a=\xff")
    with pytest.raises(InvalidArgumentError, match="is not legal"):
        asyncio.run(sweep_orphans(str(cli.metadata), log="\udcff"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("metadata", "restore", ""), "the name of the file is empty"),
        (("metadata", "dump", ""), "the name of the file is empty"),
        (("ledger", "write", ""), "the name of the file is empty"),
        (("bookie", "info", ""), "bookie id '' is not legal"),
        (("cluster", "repair", "--lost", ""), "bookie id '' is not legal"),
    ],
)
def test_an_empty_name_is_refused_as_that(cli: Cli, arguments: tuple[str, ...], says: str) -> None:
    assert says in refusal(cli, *arguments, code=2)


def test_a_cluster_restarts_no_bookie_without_a_name(cluster: RunningCluster) -> None:
    restart = ("cluster", "restart", "", "--dir", str(cluster.directory))
    assert "bookie id '' is not legal" in refusal(Cli(), *restart, code=2)


# --- the metadata store ---


def test_without_a_metadata_store_it_says_how_to_name_one() -> None:
    assert "--metadata" in refusal(Cli(), "ledger", "list", code=2)


@pytest.mark.parametrize("uri", ["ftp://x/y", "sqlite://relative/path", "zk://", "zk://host:99999/x"])
def test_wrong_uri_is_shown_with_what_is_expected(uri: str, tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    for cli, arguments in (
        (Cli(uri), ("ledger", "list")),
        (Cli(), ("cluster", "up", "--dir", str(directory), "--metadata", uri)),
    ):
        error = refusal(cli, *arguments, code=2)
        assert repr(uri) in error
        assert "sqlite:///absolute/path" in error
    assert not directory.exists()


def test_reading_makes_no_store_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "typo.db"
    cli = Cli(f"sqlite://{path}")
    for command in (
        ("ledger", "list"),
        ("bookie", "list"),
        ("bookie", "format", "--dir", str(tmp_path / "b")),
        ("log", "append", "orders"),
    ):
        assert str(path) in refusal(cli, *command, code=3)
        assert not path.exists()
        assert not (tmp_path / "b").exists()


def test_a_bookie_of_a_cluster_makes_no_other_one(tmp_path: Path) -> None:
    made = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    made.run("bookie", "format", "--new-cluster", "--dir", str(tmp_path / "b"))
    typo = Cli(f"sqlite://{tmp_path / 'typo.db'}")
    serve = ("bookie", "serve", "--dir", str(tmp_path / "b"), "--listen", "127.0.0.1:0")
    assert "typo.db" in refusal(typo, *serve, code=3)
    assert not (tmp_path / "typo.db").exists()


def test_file_that_is_no_store_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"these are my notes, and no database at all. " * 10)
    assert str(path) in refusal(Cli(f"sqlite://{path}"), "ledger", "list", code=5)


def test_unreachable_store_is_unavailable_and_named(tmp_path: Path) -> None:
    uri = "zk://127.0.0.1:1/ledgers"
    up = ("cluster", "up", "-n", "1", "--dir", str(tmp_path / "c"), "--metadata", uri)
    with ThreadPoolExecutor() as both:  # each command tries for ten seconds
        listed = both.submit(refusal, Cli(uri), "ledger", "list", code=4)
        started = both.submit(refusal, Cli(), *up, code=4)
    assert "127.0.0.1:1" in listed.result()
    assert "127.0.0.1:1" in started.result()


# --- bookies ---


def test_bookie_that_does_not_run_is_unavailable(cli: Cli) -> None:
    error = refusal(cli, "bookie", "info", "b9", code=4)
    assert "b9" in error
    assert "b1, b2, b3" in error
    assert "127.0.0.1:1" in refusal(Cli(), "bookie", "info", "127.0.0.1:1", code=4)


class _OtherProtocol(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def stranger() -> Iterator[str]:
    """The address of a server that is no bookie."""
    with socketserver.TCPServer(("127.0.0.1", 0), _OtherProtocol) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_what_is_no_bookie_is_told_as_that(stranger: str) -> None:
    error = refusal(Cli(), "bookie", "info", stranger, code=4)
    assert f"{stranger} is not a bookie" in error


def test_known_id_with_an_empty_directory_is_refused(cli: Cli, tmp_path: Path) -> None:
    directory = tmp_path / "empty"
    for command in (("serve", "--listen", "127.0.0.1:0"), ("format",)):
        error = refusal(cli, "bookie", *command, "--id", "b1", "--dir", str(directory), code=1)
        assert "knows bookie b1" in error
        assert str(directory) in error
    assert not directory.exists()


def test_directory_of_another_bookie_or_cluster_is_refused(cli: Cli, tmp_path: Path) -> None:
    directory = tmp_path / "bookie"
    other = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    mine = other.rows("bookie", "format", "--new-cluster", "--dir", str(directory), "--id", "mine")
    serve = ("bookie", "serve", "--dir", str(directory), "--listen", "127.0.0.1:0")
    assert "belongs to bookie mine, not to yours" in refusal(other, *serve, "--id", "yours", code=1)
    assert f"cluster {mine['instance_id']}" in refusal(cli, *serve, code=1)
    assert other.rows("bookie", "format", "--dir", str(directory)) == mine


def test_directory_with_files_of_others_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "no cookie" in refusal(cli, "bookie", "format", "--dir", str(tmp_path), code=1)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert not list(tmp_path.glob("*.segment"))


def test_directory_in_use_is_refused(cluster: RunningCluster) -> None:
    directory = cluster.document["bookies"][0]["directory"]
    serve = ("bookie", "serve", "--dir", directory, "--listen", "127.0.0.1:0")
    assert directory in refusal(cluster.cli, *serve, code=1)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--listen", "127.0.0.1"), "--listen"),
        (("--listen", "0.0.0.0:0"), "authentication"),
        (("--listen", "0.0.0.0:0", "--allow-remote-without-auth"), "advertise"),
        (("--advertise", "host"), "host:port"),
        (("--id", "a b"), "'a b'"),
        (("--log-level", "loud"), "loud"),
    ],
)
def test_what_a_bookie_cannot_be_told_is_named(
    cli: Cli, tmp_path: Path, options: tuple[str, ...], what: str
) -> None:
    directory = tmp_path / "bookie"
    assert what in refusal(cli, "bookie", "serve", "--dir", str(directory), *options, code=2)
    assert not directory.exists()


# --- the data ---


def test_damaged_metadata_are_told_beside_those_that_are_whole(tmp_path: Path) -> None:
    cli = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    cli.run("bookie", "format", "--new-cluster", "--dir", str(tmp_path / "b"))
    cli.run("log", "create", "whole")

    async def fill() -> None:
        whole = LedgerMetadata.new(6, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1"])
        async with await open_store(str(cli.metadata)) as store:
            await LedgerStore(store).create_ledger(whole)
            for key in (ledger_key(5), ledger_key(7), "logs/damaged"):
                await store.create(key, b"{}")

    asyncio.run(fill())
    for command, key, whole, count in (("ledger", "ledger_id", 6, 2), ("log", "log", "whole", 1)):
        out, error = cli.start(command, "list", "-o", "json").communicate(timeout=TIMEOUT_S)
        assert [row[key] for row in json.loads(out)] == [whole]
        assert len(error.splitlines()) == count
        assert error.startswith(b"bookie-aio: ")
        cli.run(command, "list", code=5)
    for wanted, found in ((("--bookie", "b1"), [6]), (("--state", "closed"), []), (("--log", "whole"), [])):
        process = cli.start("ledger", "list", *wanted, "-o", "json")
        out, error = process.communicate(timeout=TIMEOUT_S)
        assert [row["ledger_id"] for row in json.loads(out)] == found
        assert len(error.splitlines()) == 2  # Nobody can say that a filter does not mean them.
        assert process.returncode == 5


def test_a_host_that_is_not_there_is_named(tmp_path: Path) -> None:
    serve = ("bookie", "serve", "--dir", str(tmp_path / "b"), "--allow-remote-without-auth")
    cli, where = Cli(f"sqlite://{tmp_path / 'metadata.db'}"), "nosuch.invalid:0"
    assert f"cannot listen on {where}" in refusal(
        cli, *serve, "--listen", where, "--advertise", "h:1", code=1
    )
    # Not wrong usage, with which systemd starts nothing again: the name may be known a moment later.
    assert f"--http {where}" in refusal(cli, *serve, "--listen", "127.0.0.1:0", "--http", where, code=1)
    assert not list(tmp_path.iterdir())


def test_damaged_entry_is_told_and_never_served(tmp_path: Path) -> None:
    running = RunningCluster(tmp_path, "-n", "1")
    one_copy = ("-e", "1", "-w", "1", "-a", "1")
    ledger = (
        running.cli.run("ledger", "write", "-", *one_copy, stdin=b"an entry to damage\n").decode().strip()
    )
    assert running.end()[0] == 0
    (segment,) = (tmp_path / "b1").glob("*.segment")
    segment.write_bytes(segment.read_bytes().replace(b"to damage", b"to damagE"))

    running = RunningCluster(tmp_path, "-n", "1")
    try:
        error = refusal(running.cli, "ledger", "cat", ledger, code=5)
        assert f"ledger {ledger}" in error
    finally:
        assert running.end()[0] == 0
