"""What `bench` has in flight, its results that nothing loses, and the ledgers that it makes for itself."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

import client_aio
from client_aio.cli.bench import _own_ledgers
from tests.support.cli import TIMEOUT_S
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from client_aio.cli.ledger import Quorums
    from tests.support.cli import Cli

SIZES: Quorums = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}


async def test_a_ledger_whose_creation_was_interrupted_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_made, may_return, create = asyncio.Event(), asyncio.Event(), client_aio.Client.create_ledger

    async def create_slowly(self: client_aio.Client, **sizes: int) -> client_aio.LedgerWriter:
        writer = await create(self, **sizes)
        is_made.set()
        await may_return.wait()
        return writer

    monkeypatch.setattr(client_aio.Client, "create_ledger", create_slowly)
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:

        async def run() -> None:
            async with _own_ledgers(client, 1, SIZES, print):
                raise AssertionError("it was interrupted before")

        running = asyncio.create_task(run())
        await is_made.wait()
        running.cancel()
        await asyncio.sleep(0)
        may_return.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [ledger_id async for ledger_id in client.list_ledgers()] == []


@pytest.mark.parametrize("batch", ["1", "400"])
def test_large_entries_are_bounded_by_their_bytes(cli: Cli, batch: str) -> None:
    arguments = ("bench", "write", "--entry-bytes", str(1 << 20), "--entries", "300", "--batch", batch)
    process = cli.start(*arguments, "-o", "json")
    out, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, error
    row = json.loads(out)
    assert (row["entries"], row["in_flight"]) == (300, 63)
    assert error.startswith(b"63 entries are in flight, not 1,000")


def test_small_entries_are_all_in_flight(cli: Cli) -> None:
    process = cli.start("bench", "write", "--entry-bytes", "0", "--entries", "2000", "-o", "json")
    out, error = process.communicate(timeout=TIMEOUT_S)
    assert json.loads(out)["in_flight"] == 1000
    assert b"in flight" not in error


def test_a_result_is_printed_though_the_histogram_cannot_be_written(cli: Cli) -> None:
    pytest.importorskip("hdrh")
    arguments = ("bench", "write", "--entries", "200", "-o", "json", "--histogram")
    before = cli.run("ledger", "list", "--ids")  # those of other tests
    process = cli.start(*arguments, "/dev/full")
    out, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, json.loads(out)["entries"]) == (1, 200)
    assert b"the histogram /dev/full was not written: No space left on device" in error
    assert cli.run("ledger", "list", "--ids") == before


def test_a_histogram_that_cannot_be_written_is_told_before_the_run(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("hdrh")
    arguments = ("bench", "write", "--seconds", "600", "--histogram")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "nosuch" / "h", tmp_path / "file" / "h", tmp_path / ("h" * 300)):
        assert str(path)[:60].encode() in cli.run(*arguments, str(path), code=2)


def test_a_check_of_the_histogram_leaves_no_file_and_keeps_what_one_holds(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("hdrh")
    earlier, new = tmp_path / "earlier", tmp_path / "new"
    earlier.write_text("of an earlier run")
    for path in (earlier, new):
        # Wrong usage, told after the check: no run was made.
        cli.run("bench", "write", "-e", "1", "-w", "2", "--histogram", str(path), code=2)
    assert (earlier.read_text(), new.exists()) == ("of an earlier run", False)
    cli.run("bench", "write", "--entries", "10", "--histogram", str(earlier))
    assert "Percentile" in earlier.read_text()


async def test_a_ledger_that_cannot_be_deleted_leaves_no_other_behind(tmp_path: Path) -> None:
    told: list[str] = []
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:

        async def run(broken: Exception | None) -> int:
            async with _own_ledgers(client, 3, SIZES, told.append) as writers:
                first = writers[0].ledger_id
                for writer in writers:
                    await writer.close()
                await client.add_to_log(f"log{first}", [first])  # such a ledger is not deleted
                await client.delete_ledger(writers[2].ledger_id)  # no error: it is gone
                if broken is not None:
                    raise broken
            return first

        with pytest.raises(client_aio.LedgerListedError):
            await run(None)
        with pytest.raises(ZeroDivisionError):  # what ended the run is told, and not what came of it
            await run(ZeroDivisionError())
        left = [ledger_id async for ledger_id in client.list_ledgers()]
        assert len(left) == 2
        for ledger_id, text in zip(left, told, strict=True):
            assert text.startswith(f"not deleted, see `bookie-aio ledger delete`: {ledger_id}: ")


async def test_the_ledgers_that_an_interrupt_leaves_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    is_deleting = asyncio.Event()

    async def hang(self: client_aio.Client, ledger_id: int) -> None:
        is_deleting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(client_aio.Client, "delete_ledger", hang)
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:

        async def run() -> None:
            async with _own_ledgers(client, 2, SIZES, told.append):
                pass

        running = asyncio.create_task(run())
        await is_deleting.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        left = [str(ledger_id) async for ledger_id in client.list_ledgers()]
        assert told == [f"not deleted, see `bookie-aio ledger delete`: {', '.join(left)}"]
