"""The blocking adapter: nothing overtakes what was put in before, nobody waits for ever, positions exist."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

import client_aio.sync
from benchmarks.processes import Child
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def uri(tmp_path: Path) -> AsyncIterator[str]:
    async with Cluster(tmp_path) as cluster:
        yield cluster.uri


async def test_a_bulk_does_not_overtake_what_was_put_in_before(uri: str) -> None:
    def work() -> None:
        with (
            client_aio.sync.connect(uri, max_in_flight_bytes=100_000) as client,
            client.create_ledger(deferred_sync=True) as ledger,
        ):
            for round_ in range(20):
                futures = [ledger.add_entry_nowait(bytes(1000)) for _ in range(150)]
                first, _ = ledger.add_entries([b"behind"])
                assert first == futures[-1].result(30) + 1, round_

    await asyncio.to_thread(work)


SCRIPT = """
import sys, threading, client_aio, client_aio.sync

def gap(client):
    with client.create_ledger(advanced=True) as ledger:
        futures = [ledger.add_entry_nowait(bytes(1000), n) for n in range(1, 150)]
        futures.append(ledger.add_entry_nowait(bytes(1000), 0))
        print(sorted(future.result(20) for future in futures) == list(range(150)))

def callback(client):
    said = []
    done = threading.Event()
    with client.create_ledger() as ledger:
        def on_added(future):
            try:
                ledger.add_entry(b"from a callback")
            except client_aio.InvalidArgumentError as error:
                said.append(error)
            done.set()
        ledger.add_entry_nowait(b"x").add_done_callback(on_added)
        done.wait(20)
        print(bool(said))

def chain(client):
    # Callbacks that add, while a thread waits for room.
    refused = []
    with client.create_ledger() as ledger:
        def on_added(future):
            try:
                ledger.add_entry_nowait(bytes(100))
            except client_aio.BackpressureError as error:
                refused.append(error)
        for _ in range(5000):
            ledger.add_entry_nowait(bytes(1000)).add_done_callback(on_added)
        ledger.flush()
    print(True)

threading.Timer(25, lambda: (print("hangs", flush=True), __import__("os")._exit(1))).start()
with client_aio.sync.connect(sys.argv[1], max_in_flight_bytes=100_000) as client:
    globals()[sys.argv[2]](client)
sys.stdout.flush()
__import__("os")._exit(0)
"""


@pytest.mark.parametrize("what", ["gap", "callback", "chain"])
async def test_nobody_waits_for_ever(uri: str, tmp_path: Path, what: str) -> None:
    child = await Child.start(sys.executable, "-c", SCRIPT, uri, what, log=tmp_path / "log")
    assert (await asyncio.wait_for(child.line(), 60)).strip() in ("True", b"True")
    await child.end()


async def test_the_last_position_is_that_of_a_record_while_the_log_is_rolled(uri: str) -> None:
    def work() -> None:
        told = set()
        with client_aio.sync.connect(uri) as client:
            with client.open_log("a", roll_entries=40) as log:
                for _ in range(150):
                    futures = [log.append_nowait(b"x") for _ in range(40)]
                    while not futures[-1].done():
                        told.add(log.last_add_confirmed)
            records = {record.position for record in client.read_log("a")}
        assert told - {None} <= records

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        await asyncio.to_thread(work)
    finally:
        sys.setswitchinterval(before)
