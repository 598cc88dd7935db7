"""Arguments that cannot be meant are refused at once, with a typed error, by every public call."""

from __future__ import annotations

import asyncio
import inspect
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
import client_aio.sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.cluster import Cluster

WAIT_S = 20.0
NAN = float("nan")


class Scene:
    """A cluster with one of each handle."""

    def __init__(self, uri: str, client: client_aio.Client) -> None:
        self.uri = uri
        self.client = client
        self.writer: client_aio.LedgerWriter
        self.advanced: client_aio.LedgerWriter
        self.reader: client_aio.LedgerReader
        self.log: client_aio.LogWriter
        self.unbounded: client_aio.UnboundedLedgerWriter
        self.unbounded_reader: client_aio.LedgerReader

    async def open(self) -> None:
        """Open the handles."""
        client = self.client
        self.writer = await client.create_ledger()
        await self.writer.add_entry(b"0")
        self.advanced = await client.create_ledger(advanced=True)
        self.reader = await client.open_ledger(self.writer.ledger_id)
        self.log = await client.open_log("orders")
        self.unbounded = await client.open_unbounded_ledger("payments")
        self.unbounded_reader = await client.open_ledger("payments")


@pytest.fixture
async def scene(cluster: Cluster) -> AsyncIterator[Scene]:
    async with client_aio.connect(cluster.uri) as client:
        made = Scene(cluster.uri, client)
        await made.open()
        yield made


CALLS: dict[str, Callable[[Scene], Any]] = {
    # connecting
    "connect(None)": lambda s: client_aio.connect(None),
    "connect(5)": lambda s: client_aio.connect(5),
    "connect('')": lambda s: client_aio.connect(""),
    "connect(relative)": lambda s: client_aio.connect("sqlite://m.db"),
    "connect(config=None)": lambda s: client_aio.connect(s.uri, config=None),
    "connect(placement=5)": lambda s: client_aio.connect(s.uri, placement=5),
    "connect(rng=5)": lambda s: client_aio.connect(s.uri, rng=5),
    "connect(unknown setting)": lambda s: client_aio.connect(s.uri, read_time_s=1),
    "connect(NaN)": lambda s: client_aio.connect(s.uri, read_timeout_s=NAN),
    "connect(text)": lambda s: client_aio.connect(s.uri, read_timeout_s="1"),
    # ledgers
    "create_ledger(E text)": lambda s: s.client.create_ledger(ensemble_size="3"),
    "create_ledger(Qa 0)": lambda s: s.client.create_ledger(ack_quorum=0),
    "create_ledger(digest)": lambda s: s.client.create_ledger(digest="md5"),
    "create_ledger(no password)": lambda s: s.client.create_ledger(digest="hmac-sha256"),
    "create_ledger(text password)": lambda s: s.client.create_ledger(
        digest="hmac-sha256",
        password="text",
    ),
    "create_ledger(password None)": lambda s: s.client.create_ledger(password=None),
    "create_ledger(custom list)": lambda s: s.client.create_ledger(custom_metadata=[1]),
    "create_ledger(custom text)": lambda s: s.client.create_ledger(custom_metadata={"a": "b"}),
    "create_ledger(advanced text)": lambda s: s.client.create_ledger(advanced="no"),
    "create_ledger(deferred 1)": lambda s: s.client.create_ledger(deferred_sync=1),
    "open_ledger(-1)": lambda s: s.client.open_ledger(-1),
    "open_ledger(True)": lambda s: s.client.open_ledger(True),
    "open_ledger(2**63)": lambda s: s.client.open_ledger(2**63),
    "open_ledger(1.0)": lambda s: s.client.open_ledger(1.0),
    "open_ledger('')": lambda s: s.client.open_ledger(""),
    "open_ledger(None)": lambda s: s.client.open_ledger(None),
    "open_ledger(recover text)": lambda s: s.client.open_ledger(0, recover="no"),
    "open_ledger(accept_loss alone)": lambda s: s.client.open_ledger(0, accept_loss=True),
    "open_ledger(text password)": lambda s: s.client.open_ledger(0, password=""),
    "delete_ledger(-1)": lambda s: s.client.delete_ledger(-1),
    "delete_ledger(force text)": lambda s: s.client.delete_ledger(0, force="no"),
    "ledger_metadata(None)": lambda s: s.client.ledger_metadata(None),
    "ledger_replicas(-1)": lambda s: s.client.ledger_replicas(-1),
    "list_ledgers(-1)": lambda s: s.client.list_ledgers(first=-1),
    "list_ledgers(text)": lambda s: s.client.list_ledgers(first="0"),
    "repair_ledger(-1)": lambda s: s.client.repair_ledger(-1, replace="b1"),
    "repair_ledger('a/b')": lambda s: s.client.repair_ledger(0, replace="a/b"),
    "repair_ledger(by '')": lambda s: s.client.repair_ledger(0, replace="b1", by=""),
    "repair_ledger(NaN)": lambda s: s.client.repair_ledger(0, replace="b1", recover_after_s=NAN),
    "repair_ledger(-1 s)": lambda s: s.client.repair_ledger(0, replace="b1", recover_after_s=-1),
    "repair_ledger(on_progress)": lambda s: s.client.repair_ledger(0, replace="b1", on_progress=5),
    # writers and readers
    "add_entry(text)": lambda s: s.writer.add_entry("text"),
    "add_entry(None)": lambda s: s.writer.add_entry(None),
    "add_entry(id)": lambda s: s.writer.add_entry(b"", 5),
    "add_entry(too large)": lambda s: s.writer.add_entry(bytes((4 << 20) + 1)),
    "advanced add_entry(no id)": lambda s: s.advanced.add_entry(b""),
    "advanced add_entry(-1)": lambda s: s.advanced.add_entry(b"", -1),
    "advanced add_entry(2**63)": lambda s: s.advanced.add_entry(b"", 2**63),
    "advanced add_entry(text)": lambda s: s.advanced.add_entry(b"", "0"),
    "advanced add_entry(True)": lambda s: s.advanced.add_entry(b"", True),
    "add_batch(None)": lambda s: s.writer.add_batch(None),
    "add_batch(bytes)": lambda s: s.writer.add_batch(b"abc"),
    "add_batch(text)": lambda s: s.writer.add_batch("abc"),
    "add_batch(of text)": lambda s: s.writer.add_batch([b"1", "abc"]),
    "add_batch(nothing)": lambda s: s.writer.add_batch([]),
    "add_batch(iterator)": lambda s: s.writer.add_batch(iter([b"1"])),
    "add_batch(too large)": lambda s: s.writer.add_batch([b"1", bytes((4 << 20) + 1)]),
    "advanced add_batch": lambda s: s.advanced.add_batch([b"1"]),
    "add_entries(None)": lambda s: s.writer.add_entries(None),
    "add_entries(bytes)": lambda s: s.writer.add_entries(b"abc"),
    "add_entries(text)": lambda s: s.writer.add_entries("abc"),
    "add_entries(of text)": lambda s: s.writer.add_entries(["abc"]),
    "writer.read(-1)": lambda s: s.writer.read(-1, 0),
    "read(-1, 0)": lambda s: s.reader.read(-1, 0),
    "read(1, -1)": lambda s: s.reader.read(1, -1),
    "read(0, 2**63)": lambda s: s.reader.read(0, 2**63),
    "read(text)": lambda s: s.reader.read("0", "1"),
    "read(True)": lambda s: s.reader.read(True, True),
    "read_batches(-1)": lambda s: s.reader.read_batches(-1, 0),
    "read_batches(known_lac='x')": lambda s: s.reader.read_batches(0, 0, known_lac="x"),
    "unbounded read_batches(known_lac=None)": lambda s: s.unbounded_reader.read_batches(0, 0, known_lac=None),
    "read_unconfirmed(2**63)": lambda s: s.reader.read_unconfirmed(2**63, 2**63),
    "tail(2**63)": lambda s: s.reader.tail(2**63),
    "tail(-1)": lambda s: s.reader.tail(-1),
    "tail(None)": lambda s: s.reader.tail(None),
    "tail_batches(0.5)": lambda s: s.reader.tail_batches(0.5),
    # logs
    "open_log('')": lambda s: s.client.open_log(""),
    "open_log('a/b')": lambda s: s.client.open_log("a/b"),
    "open_log(None)": lambda s: s.client.open_log(None),
    "open_log(create text)": lambda s: s.client.open_log("a", create="no"),
    "open_log(roll NaN)": lambda s: s.client.open_log("a", roll_age_s=NAN),
    "open_log(roll 0)": lambda s: s.client.open_log("a", roll_bytes=0),
    "open_log(roll text)": lambda s: s.client.open_log("a", roll_entries="5"),
    "open_log(timeout 0)": lambda s: s.client.open_log("a", append_timeout_s=0),
    "open_log(timeout NaN)": lambda s: s.client.open_log("a", append_timeout_s=NAN),
    "open_log(timeout text)": lambda s: s.client.open_log("a", append_timeout_s="1"),
    "create_log('a b')": lambda s: s.client.create_log("a b"),
    "create_log(custom)": lambda s: s.client.create_log("a", custom_metadata=5),
    "append(text)": lambda s: s.log.append("text"),
    "append(None)": lambda s: s.log.append(None),
    "append_batch(None)": lambda s: s.log.append_batch(None),
    "append_batch(nothing)": lambda s: s.log.append_batch([]),
    "append_batch(of text)": lambda s: s.log.append_batch(["abc"]),
    "append_batch(too large)": lambda s: s.log.append_batch([bytes((4 << 20) + 1)]),
    "read_log('')": lambda s: s.client.read_log(""),
    "read_log(start text)": lambda s: s.client.read_log("orders", "beginning"),
    "read_log(start True)": lambda s: s.client.read_log("orders", True),
    "read_log(start NaN)": lambda s: s.client.read_log("orders", NAN),
    "read_log(start pair)": lambda s: s.client.read_log("orders", (0, -1)),
    "read_log(start object)": lambda s: s.client.read_log("orders", object()),
    "read_log(naive time)": lambda s: s.client.read_log("orders", datetime(2026, 1, 1)),
    "read_log(on_gap)": lambda s: s.client.read_log("orders", on_gap="ignore"),
    "read_log(on_gap None)": lambda s: s.client.read_log("orders", on_gap=None),
    "read_log(wait alone)": lambda s: s.client.read_log("orders", wait=True),
    "read_log(follow text)": lambda s: s.client.read_log("orders", follow="no"),
    "truncate_log(None)": lambda s: s.client.truncate_log("orders", None),
    "truncate_log(5)": lambda s: s.client.truncate_log("orders", 5),
    "truncate_log(text)": lambda s: s.client.truncate_log("orders", "7"),
    "truncate_log(beyond)": lambda s: s.client.truncate_log("orders", (2**62, 0)),
    "delete_log(None)": lambda s: s.client.delete_log(None),
    "log_metadata('a/b')": lambda s: s.client.log_metadata("a/b"),
    "add_to_log(text)": lambda s: s.client.add_to_log("orders", "12"),
    "add_to_log(bytes)": lambda s: s.client.add_to_log("orders", b"12"),
    "add_to_log(None)": lambda s: s.client.add_to_log("orders", None),
    "add_to_log(-1)": lambda s: s.client.add_to_log("orders", [-1]),
    "add_to_log(twice)": lambda s: s.client.add_to_log("orders", [0, 0]),
    "add_to_log(transaction)": lambda s: s.client.add_to_log("orders", [0], transaction=("q", -1)),
    "add_to_log(transaction True)": lambda s: s.client.add_to_log("orders", [0], transaction=("q", True)),
    "add_to_log(replace text)": lambda s: s.client.add_to_log("orders", [0], replace="no"),
    "sweep(NaN)": lambda s: s.client.sweep_log_orphans(older_than_s=NAN),
    "sweep(-1)": lambda s: s.client.sweep_log_orphans(older_than_s=-1),
    "sweep(text)": lambda s: s.client.sweep_log_orphans(older_than_s="1"),
    "Position.parse(None)": lambda s: client_aio.Position.parse(None),
    "Position.parse('1')": lambda s: client_aio.Position.parse("1"),
    "Position.check(-1)": lambda s: client_aio.Position.check((-1, 0)),
    "LeaderElection(5)": lambda s: client_aio.LeaderElection(5, "a"),
    "LeaderElection('')": lambda s: client_aio.LeaderElection(s.client, ""),
    "LeaderElection(text)": lambda s: client_aio.LeaderElection(s.client, "a", "text"),
    # unbounded ledgers
    "open_unbounded_ledger('')": lambda s: s.client.open_unbounded_ledger(""),
    "open_unbounded_ledger(-1)": lambda s: s.client.open_unbounded_ledger(-1),
    "open_unbounded_ledger(0 bytes)": lambda s: s.client.open_unbounded_ledger("a", fragment_bytes=0),
    "open_unbounded_ledger(True)": lambda s: s.client.open_unbounded_ledger("a", fragment_bytes=True),
    "create_unbounded_ledger(5)": lambda s: s.client.create_unbounded_ledger(5),
    "read_unbounded_ledger(-1)": lambda s: s.client.read_unbounded_ledger("payments", -1),
    "read_unbounded_ledger(2**63)": lambda s: s.client.read_unbounded_ledger("payments", 2**63),
    "unbounded tail(text)": lambda s: s.unbounded_reader.tail("0"),
    "unbounded tail(2**63)": lambda s: s.unbounded_reader.tail(2**63),
    "trim_unbounded_ledger(-1)": lambda s: s.client.trim_unbounded_ledger("payments", -1),
    "trim_unbounded_ledger(text)": lambda s: s.client.trim_unbounded_ledger("payments", "0"),
    "trim_unbounded_ledger(bounded)": lambda s: s.client.trim_unbounded_ledger(s.writer.ledger_id, 0),
    "trim(-1)": lambda s: s.unbounded.trim(-1),
    "trim(True)": lambda s: s.unbounded.trim(True),
    "trim(text)": lambda s: s.unbounded.trim("0"),
}


async def outcome(call: Callable[[Scene], Any], scene: Scene) -> BaseException | None:
    """Return what a call raises, or the first result of what it returns; None where it succeeds."""
    try:
        made = call(scene)
        if inspect.isasyncgen(made):
            made = anext(made, None)
        if inspect.isawaitable(made):
            await asyncio.wait_for(made, WAIT_S)
    except BaseException as error:
        return error
    return None


async def test_every_call_refuses_what_cannot_be_meant(scene: Scene) -> None:
    wrong = {}
    for what, call in CALLS.items():
        error = await outcome(call, scene)
        if not isinstance(error, client_aio.InvalidArgumentError):
            wrong[what] = repr(error)
    assert not wrong
    # And nothing was harmed by it.
    assert await scene.writer.add_entry(b"1") == 1
    assert (await scene.log.append(b"0")).entry_id == 0
    assert [each async for each in scene.client.list_logs()] == ["orders"]


async def test_the_blocking_calls_refuse_the_same(scene: Scene) -> None:
    def run() -> dict[str, str]:
        wrong = {}
        with client_aio.sync.connect(scene.uri) as client:
            writer = client.create_ledger()
            reader = client.open_ledger(writer.ledger_id)
            calls: dict[str, Callable[[], Any]] = {
                "connect(None)": lambda: client_aio.sync.connect(None),
                "create_ledger(E)": lambda: client.create_ledger(ensemble_size=0),
                "open_ledger(-1)": lambda: client.open_ledger(-1),
                "delete_ledger(force)": lambda: client.delete_ledger(0, force="no"),
                "list_ledgers(-1)": lambda: client.list_ledgers(first=-1),
                "add_entry(text)": lambda: writer.add_entry("text"),
                "add_entry(id)": lambda: writer.add_entry(b"", 7),
                "add_batch(nothing)": lambda: writer.add_batch([]),
                "add_batch(of text)": lambda: writer.add_batch([b"1", "abc"]),  # type: ignore[list-item]
                "add_entries(None)": lambda: writer.add_entries(None),
                "add_entries(bytes)": lambda: writer.add_entries(b"abc"),
                "add_entries(of text)": lambda: writer.add_entries(["abc"]),
                "read(-1)": lambda: next(reader.read(-1, 0), None),
                "tail(2**63)": lambda: next(reader.tail(2**63), None),
                "open_log('')": lambda: client.open_log(""),
                "create_log('')": lambda: client.create_log(""),
                "read_log(on_gap)": lambda: next(client.read_log("orders", on_gap="x"), None),
                "truncate_log(5)": lambda: client.truncate_log("orders", 5),
                "add_to_log(text)": lambda: client.add_to_log("orders", "12"),
                "sweep(NaN)": lambda: client.sweep_log_orphans(older_than_s=NAN),
                "open_unbounded_ledger(-1)": lambda: client.open_unbounded_ledger(-1),
            }
            for what, call in calls.items():
                try:
                    call()
                except client_aio.InvalidArgumentError:
                    continue
                except BaseException as error:
                    wrong[what] = repr(error)
                else:
                    wrong[what] = "done"
        return wrong

    assert not await asyncio.wait_for(asyncio.to_thread(run), 60.0)


def test_no_call_that_takes_arguments_is_left_out() -> None:
    """Each method that takes arguments of an application is in the table above, by its name."""
    handles = (
        client_aio.Client,
        client_aio.LedgerWriter,
        client_aio.LedgerReader,
        client_aio.LogWriter,
        client_aio.UnboundedLedgerWriter,
        client_aio.UnboundedLedgerReader,
    )
    taking = {
        name
        for handle in handles
        for name, method in inspect.getmembers(handle, inspect.isfunction)
        if not name.startswith("_") and len(inspect.signature(method).parameters) > 1
    }
    text = " ".join(CALLS)
    missing = {
        name
        for name in taking - _NOT_FOR_APPLICATIONS
        if not any(part in text for part in (name, _SHORT.get(name, name)))
    }
    assert not missing


_SHORT = {"sweep_log_orphans": "sweep(", "read_log_batches": "read_log("}
_NOT_FOR_APPLICATIONS = {
    "begin", "check_size", "close", "hold", "on_failed", "on_progress", "read_rest", "refresh", "switch_to",
    "take",
}  # fmt: skip
