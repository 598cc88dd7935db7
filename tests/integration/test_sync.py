"""The blocking adapter: from threads, across forks, against real bookies."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from typing import TYPE_CHECKING

import pytest

import client_aio
import client_aio.sync
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1024 * 1024


@pytest.fixture
async def uri(tmp_path: Path) -> Iterator[str]:
    async with Cluster(tmp_path) as cluster:
        yield cluster.uri


def in_thread(function, *arguments):
    """Run blocking code while the test's own loop is not in its way."""
    result: list[object] = []

    def run() -> None:
        try:
            result.append(function(*arguments))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)  # one that hangs fails its test alone
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def write_and_read(uri: str) -> None:
    with client_aio.sync.connect(uri, max_in_flight_bytes=MIB) as client:
        with client.create_ledger(custom_metadata={"by": b"sync"}) as ledger:
            assert ledger.add_entry(b"zero") == 0
            assert repr(ledger).startswith(f"<blocking LedgerWriter of ledger {ledger.ledger_id}: LAC 0")
            assert repr(client) == "<blocking Client: open, 3 bookies>"
            futures = [ledger.add_entry_nowait(b"x" * 1000) for _ in range(5000)]  # five times the window
            ledger.flush()
            assert [future.result(timeout=0) for future in futures] == list(range(1, 5001))
            assert ledger.add_entries(bytes([n % 256]) * 100 for n in range(20_000)) == (5001, 25_000)
            assert ledger.last_add_confirmed == 25_000
        assert ledger.metadata.is_closed
        assert client.list_ledgers() == [ledger.ledger_id]
        assert client.ledger_metadata(ledger.ledger_id).custom == {"by": b"sync"}
        with client.open_ledger(ledger.ledger_id) as reader:
            assert repr(reader) == f"<blocking LedgerReader of ledger {ledger.ledger_id}: CLOSED, LAC 25000>"
            assert reader.is_closed
            data = [entry.data for entry in reader.read(0, reader.last_add_confirmed)]
            assert data[0] == b"zero"
            assert data[1:5001] == [b"x" * 1000] * 5000
            assert data[5001:] == [bytes([n % 256]) * 100 for n in range(20_000)]
            assert len(list(reader.tail(24_990))) == 11
            partly = reader.read(0, 100)
            next(partly)
            partly.close()
        client.delete_ledger(ledger.ledger_id)
        with pytest.raises(client_aio.NoSuchLedgerError):
            client.open_ledger(ledger.ledger_id)


async def test_what_is_written_blocking_is_read_blocking(uri: str) -> None:
    in_thread(write_and_read, uri)


def add_and_raise(ledger: client_aio.sync.LedgerWriter) -> None:
    with ledger:
        ledger.add_entry(b"kept")
        raise RuntimeError("mine")


async def test_errors_come_through(uri: str) -> None:
    def run() -> None:
        with client_aio.sync.connect(uri) as client:
            with pytest.raises(client_aio.InvalidArgumentError, match="write_quorum"):
                client.create_ledger(ensemble_size=1)
            with pytest.raises(client_aio.InvalidArgumentError, match="str"):
                client.create_ledger().add_entries(["text"])
            ledger = client.create_ledger()
            with pytest.raises(RuntimeError, match="mine"):
                add_and_raise(ledger)
            assert client.ledger_metadata(ledger.ledger_id).state is client_aio.LedgerState.OPEN
            with pytest.raises(client_aio.WriterAbortedError):
                ledger.add_entry(b"late")
            with client.open_ledger(ledger.ledger_id, recover=True) as reader:
                assert [entry.data for entry in reader.read(0, reader.last_add_confirmed)] == [b"kept"]

    in_thread(run)


async def test_handles_cannot_be_pickled_and_say_what_to_do(uri: str) -> None:
    def run() -> None:
        with client_aio.sync.connect(uri) as client, pytest.raises(TypeError, match="metadata URI"):
            pickle.dumps(client)

    in_thread(run)


def _in_fork(uri: str, client: client_aio.sync.Client, results: multiprocessing.SimpleQueue[object]) -> None:
    try:
        client.list_ledgers()
    except client_aio.ClientClosedError as error:
        results.put(str(error))
    with client_aio.sync.connect(uri) as mine, mine.create_ledger() as ledger:
        results.put(ledger.add_entry(b"from the fork"))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # as Python 3.12 has it
async def test_a_fork_makes_its_own_loop_and_refuses_handles_of_its_parent(uri: str) -> None:
    def run() -> None:
        context = multiprocessing.get_context("fork")
        results: multiprocessing.SimpleQueue[object] = context.SimpleQueue()
        with client_aio.sync.connect(uri) as client:
            child = context.Process(target=_in_fork, args=(uri, client, results))
            child.start()
            child.join(30)
            child.kill()
            assert child.exitcode == 0
            assert "connect there" in results.get()
            assert results.get() == 0
            assert len(client.list_ledgers()) == 1  # the parent's own goes on

    in_thread(run)


def write_in_other_ways(uri: str) -> None:
    with client_aio.sync.connect(uri) as client:
        with client.create_ledger(advanced=True) as ledger:
            late = ledger.add_entry_nowait(b"1", 1)
            refused = ledger.add_entry_nowait(b"again", 1)
            without = ledger.add_entry_nowait(b"no id")
            assert ledger.add_entry(b"0", 0) == 0
            assert late.result(60) == 1
            for wrong in (refused, without):
                with pytest.raises(client_aio.InvalidArgumentError):
                    wrong.result(60)
        assert ledger.metadata.last_entry == 1
        with client.create_ledger(deferred_sync=True) as ledger:
            assert ledger.add_entry(b"received") == 0
            assert ledger.last_add_confirmed == -1
            assert ledger.force() == 0
            assert ledger.last_add_confirmed == 0


def add_without_forcing(uri: str) -> None:
    with client_aio.sync.connect(uri, max_in_flight_bytes=100_000) as client:
        with client.create_ledger(deferred_sync=True) as ledger:
            futures = [ledger.add_entry_nowait(bytes(10_000)) for _ in range(100)]
            assert [future.result(30) for future in futures] == list(range(100))
            more = [ledger.add_entry_nowait(bytes(10_000)) for _ in range(100)]
            assert ledger.force() == 199
        assert all(future.done() for future in more)
        assert ledger.metadata.last_entry == 199


async def test_what_has_not_been_forced_leaves_room_for_more(uri: str) -> None:
    in_thread(add_without_forcing, uri)


async def test_write_options_and_refused_adds(uri: str) -> None:
    in_thread(write_in_other_ways, uri)
