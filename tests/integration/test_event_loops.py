"""An application that cancels all tasks of its event loop, or uses a client on another loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import threading
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from client_aio import InvalidArgumentError
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

LASTS_S = 60


async def cancel_all_but(kept: set[asyncio.Task[Any]]) -> None:
    """Do as a usual recipe at SIGTERM does, but for the tasks that watch the processes of the test."""
    others = asyncio.all_tasks() - {asyncio.current_task()} - kept
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def test_a_ledger_goes_on_after_all_tasks_were_cancelled(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=5) as cluster:
        kept = asyncio.all_tasks()
        client = await client_aio.connect(cluster.uri)
        writer = await client.create_ledger()
        await writer.add_entry(b"0")
        reader = await client.open_ledger(writer.ledger_id)
        await cancel_all_but(kept)
        tailing = asyncio.create_task(_tailed(reader))
        killed = writer.metadata.last_fragment.bookies[:2]
        for name in killed:
            await cluster[name].kill()
        adding = writer.add_entry(b"1")
        await asyncio.sleep(0)
        await cancel_all_but({*kept, tailing})
        async with asyncio.timeout(LASTS_S):
            assert await adding == 1
            await writer.close()
            async with client.open_ledger(writer.ledger_id, recover=True) as again:
                assert again.is_closed
            assert await tailing >= 1
            await client.close()


@pytest.mark.parametrize("guaranteed", [False, True])
@pytest.mark.parametrize("has_happened", [False, True])
async def test_an_ensemble_change_that_is_cancelled_at_its_compare_and_set_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_happened: bool, guaranteed: bool
) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster:
        kept = asyncio.all_tasks()
        client = await client_aio.connect(cluster.uri)
        writer = await client.create_ledger(ack_quorum=3, guaranteed_write_quorum=guaranteed)
        await writer.add_entry(b"0")
        ledgers = client._context.ledgers
        write, reached = ledgers.compare_and_set, asyncio.Event()

        async def cut_off(metadata: LedgerMetadata, version: Version, **given: Any) -> Version:
            if not reached.is_set():
                if has_happened:
                    await write(metadata, version, **given)
                reached.set()
                await asyncio.Event().wait()
            return await write(metadata, version, **given)

        monkeypatch.setattr(ledgers, "compare_and_set", cut_off)
        lost = writer.metadata.last_fragment.bookies[0]
        async with asyncio.timeout(LASTS_S):
            await cluster[lost].kill()
            adding = writer.add_entry(b"1")
            await reached.wait()
            await cancel_all_but(kept)
            assert await adding == 1
            assert lost not in writer.metadata.last_fragment.bookies
            await writer.close()
            reader = await client.open_ledger(writer.ledger_id)
            assert [entry.data async for entry in reader.read(0, 1)] == [b"0", b"1"]
            await client.close()


async def _tailed(reader: client_aio.LedgerReader) -> int:
    return len([entry async for entry in reader.tail(0)])


async def test_a_log_rolls_and_is_followed_after_all_tasks_were_cancelled(cluster: Cluster) -> None:
    kept = asyncio.all_tasks()
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a")
        await log.append(b"0")
        found: list[bytes] = []
        three = asyncio.Event()

        async def follow() -> None:
            async for record in client.read_log("a", follow=True):
                found.append(bytes(record.data))
                if len(found) == 3:
                    three.set()

        following = asyncio.create_task(follow())
        await cancel_all_but({*kept, following})
        async with asyncio.timeout(LASTS_S):
            await log.roll()
            await log.append(b"1")
            await cancel_all_but({*kept, following})
            await log.roll()
            await log.append(b"2")
            await three.wait()
            await log.close()
        assert found == [b"0", b"1", b"2"]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_follower_goes_on_whenever_all_other_tasks_are_cancelled(cluster: Cluster) -> None:
    """It waits for the log's list nearly all the time, in tasks of its own."""
    kept = asyncio.all_tasks()
    async with client_aio.connect(cluster.uri) as client, asyncio.timeout(LASTS_S):
        log = await client.open_log("a")
        await log.append(b"0")
        await log.close()
        found: asyncio.Queue[bytes] = asyncio.Queue()

        async def follow() -> None:
            async for record in client.read_log("a", follow=True):
                found.put_nowait(bytes(record.data))

        following = asyncio.create_task(follow())
        assert await found.get() == b"0"
        for number in range(1, 6):
            for _ in range(10):
                await asyncio.sleep(0.01)
                await cancel_all_but({*kept, following})
            async with client.open_log("a") as again:
                await again.append(b"%d" % number)
            getting = asyncio.create_task(found.get())
            await asyncio.wait([getting, following], return_when=asyncio.FIRST_COMPLETED)
            assert not following.done()
            assert await getting == b"%d" % number
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_roll_that_is_cancelled_at_any_step_loses_nothing(cluster: Cluster) -> None:
    kept = asyncio.all_tasks()
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a")
        appended: list[bytes] = []
        async with asyncio.timeout(2 * LASTS_S):
            for steps in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144):
                appended.append(b"%d" % steps)
                appending = log.append(appended[-1])
                rolling = asyncio.create_task(log.roll())
                for _ in range(steps):
                    await asyncio.sleep(0)
                await cancel_all_but({*kept, rolling})
                await appending
                await rolling
            await log.close()
        assert [bytes(record.data) async for record in client.read_log("a")] == appended
        metadata = await client.log_metadata("a")
        states = [(await client.ledger_metadata(row.ledger_id)).is_closed for row in metadata.rows]
        assert all(states)


async def test_a_writer_heals_and_a_candidate_is_elected_after_all_tasks_were_cancelled(
    cluster: Cluster,
) -> None:
    kept = asyncio.all_tasks()
    async with client_aio.connect(cluster.uri) as client, client_aio.LeaderElection(client, "a") as election:
        log = await client.open_log("a")
        await log.append(b"0")
        await asyncio.gather(cluster["b1"].kill(), cluster["b2"].kill())
        outstanding = log.append(b"1")
        async with asyncio.timeout(LASTS_S):
            async with contextlib.aclosing(log.states()) as states:
                async for state in states:
                    if state is client_aio.WriterState.HEALING:
                        break
            await cancel_all_but(kept)
            await asyncio.gather(cluster["b1"].start(), cluster["b2"].start())
            await outstanding
            await election.gained()
            await log.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_client_says_that_it_belongs_to_another_event_loop(tmp_path: Path) -> None:
    async def first(uri: str) -> tuple[client_aio.Client, Any, Any, Any]:
        client = await client_aio.connect(uri)
        writer = await client.create_ledger()
        await writer.add_entry(b"0")
        log = await client.open_log("a")
        await log.append(b"0")
        return client, writer, log, await client.open_ledger(writer.ledger_id)

    async def second(client: client_aio.Client, writer: Any, log: Any, reader: Any) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: writer.add_entry(b"1"), lambda: writer.add_batch([b"1"]),
            lambda: writer.add_entries([b"1"]), writer.flush, writer.force, writer.close, writer.abort,
            lambda: log.append(b"1"), lambda: log.append_batch([b"1"]),
            log.flush, log.roll, log.close, log.abort,
            reader.read_last_add_confirmed, client.create_ledger, lambda: client.open_log("b"),
            lambda: client.ledger_metadata(0), lambda: client.delete_log("a"),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(InvalidArgumentError, match="belongs to another event loop"):
                async with asyncio.timeout(LASTS_S):
                    await call()
        with pytest.raises(InvalidArgumentError, match="belongs to another event loop"):
            [entry async for entry in reader.tail(0)]
        async with asyncio.timeout(LASTS_S):
            await client.close()

    with asyncio.Runner() as runner:
        cluster = Cluster(tmp_path)
        runner.run(cluster.__aenter__())
        try:
            asyncio.run(second(*asyncio.run(first(cluster.uri))))
        finally:
            runner.run(cluster.end())
            gc.collect()  # The sockets of a loop that is gone are shut down, and closed by Python.


HANDLES = (
    "Client", "LedgerWriter", "LedgerReader", "LogWriter", "UnboundedLedgerWriter", "UnboundedLedgerReader",
    "LeaderElection",
)  # fmt: skip
ANYWHERE = {"Client.close", "LedgerReader.close", "UnboundedLedgerReader.close"}
"""These do what they can on any loop."""
ONCE_THEY_WAIT = {"LedgerWriter.drain", "LogWriter.drain", "UnboundedLedgerWriter.drain"}
"""These are called for each add, and look at the loop when there is something to wait for."""
OF_THE_PACKAGE = {
    "start", "begin", "hold", "on_failed", "on_progress", "switch_to", "withdraw", "check_size",
}  # fmt: skip
"""Not for applications: other modules of the package call them, on the client's loop."""
ARGUMENTS: dict[str, Any] = {
    "name": "a", "ledger_ids": [0], "ledger_id": 0, "name_or_id": "u", "data": b"1", "entries": [b"1"],
    "records": [b"1"], "first": 0, "last": 0, "first_entry": 0, "before": "0:0", "before_entry": 0,
    "replace": "b1",
}  # fmt: skip
"""The arguments that a call cannot do without."""


def _calls() -> list[str]:
    """Return every call that an application has, as CLASS.METHOD: a new one cannot be forgotten."""
    found = []
    for kind in HANDLES:
        for name, _ in inspect.getmembers(getattr(client_aio, kind), callable):
            is_public = not name.startswith("_") or (kind, name) == ("LeaderElection", "__aenter__")
            if is_public and name not in OF_THE_PACKAGE and f"{kind}.{name}" not in ANYWHERE | ONCE_THEY_WAIT:
                found.append(f"{kind}.{name}")
    return found


def _call(handle: Any, name: str) -> Any:
    method = getattr(handle, name)
    parameters = inspect.signature(method).parameters.values()
    return method(**{each.name: ARGUMENTS[each.name] for each in parameters if each.default is each.empty})


async def _finish(called: Any) -> None:
    """Wait for a call's result, or take the first of what it iterates over."""
    if hasattr(called, "__anext__"):
        await anext(called)
    else:
        await called


@pytest.mark.pure  # it reads the signatures of coroutines
async def test_each_public_call_says_that_its_client_belongs_to_another_loop(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.LeaderElection(client, "e") as election:
        writer = await client.create_ledger()
        unbounded = await client.open_unbounded_ledger("u")
        handles = {
            "Client": client,
            "LedgerWriter": writer,
            "LedgerReader": await client.open_ledger(writer.ledger_id),
            "LogWriter": await client.open_log("a"),
            "UnboundedLedgerWriter": unbounded,
            "UnboundedLedgerReader": await client.open_ledger("u"),
            "LeaderElection": election,
        }
        wrong: dict[str, object] = {}

        async def there(call: str) -> None:
            kind, _, name = call.partition(".")
            try:
                async with asyncio.timeout(LASTS_S / 10):
                    await _finish(_call(handles[kind], name))
            except InvalidArgumentError as error:
                if "belongs to another event loop" not in str(error):
                    wrong[call] = error
            except BaseException as error:
                wrong[call] = repr(error)
            else:
                wrong[call] = "went through"

        async def all_there() -> None:
            for call in _calls():
                await there(call)

        def without_a_loop() -> None:
            for handle, name in ((writer, "add_entry"), (handles["LogWriter"], "append")):
                with pytest.raises(InvalidArgumentError, match="belongs to another event loop"):
                    _call(handle, name)

        await asyncio.to_thread(asyncio.run, all_there())
        await asyncio.to_thread(without_a_loop)
        assert not wrong, "\n".join(f"{k}: {v!r}"[:150] for k, v in wrong.items())
        async with asyncio.timeout(LASTS_S):  # Nothing of it has disturbed the handles.
            assert await writer.add_entry(b"1") == 0
            assert await unbounded.add_entry(b"1") == 0
            await handles["LogWriter"].append(b"1")
            await election.gained()


async def test_a_client_is_closed_from_another_thread(cluster: Cluster) -> None:
    client = await client_aio.connect(cluster.uri)
    writer = await client.create_ledger()
    refused: list[BaseException] = []

    async def there() -> None:
        await client.close()

    def run() -> None:
        for call in (lambda: writer.add_entry(b"1"), lambda: asyncio.run(_awaited(writer.flush()))):
            try:
                call()
            except InvalidArgumentError as error:
                refused.append(error)
        asyncio.run(there())

    async with asyncio.timeout(LASTS_S):
        await asyncio.to_thread(run)
    assert len(refused) == 2
    with pytest.raises(client_aio.ClientClosedError):
        await client.create_ledger()


async def test_an_add_of_another_thread_is_refused_in_the_middle_of_a_burst(cluster: Cluster) -> None:
    """The adds of a burst are checked by a shorter way than the first one."""
    async with client_aio.connect(cluster.uri) as client, client.create_ledger() as writer:
        added = writer.add_entry(b"0")
        refused: list[BaseException] = []

        def add() -> None:
            try:
                writer.add_entry(b"1")
            except InvalidArgumentError as error:
                refused.append(error)

        other = threading.Thread(target=add)
        other.start()
        other.join(LASTS_S)
        assert len(refused) == 1
        assert [await added, await writer.add_entry(b"2")] == [0, 1]


def test_an_add_on_another_loop_is_refused_in_the_middle_of_a_burst(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    cluster = Cluster(tmp_path)
    loop.run_until_complete(cluster.__aenter__())
    try:
        client = loop.run_until_complete(client_aio.connect(cluster.uri).__aenter__())
        writer = loop.run_until_complete(client.create_ledger())

        async def add() -> None:
            writer.add_entry(b"1")

        added: list[asyncio.Future[int]] = []
        loop.call_soon(loop.stop)
        loop.call_soon(lambda: added.append(writer.add_entry(b"0")))
        loop.run_forever()
        assert added
        with pytest.raises(InvalidArgumentError, match="belongs to another event loop"):
            asyncio.run(add())
        assert loop.run_until_complete(asyncio.wait_for(added[0], LASTS_S)) == 0
        loop.run_until_complete(client.close())
    finally:
        loop.run_until_complete(cluster.end())
        loop.close()


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


async def test_leaving_does_not_raise_a_failure_again_that_the_application_knows(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        for look in ("future", "flush"):
            async with client.create_ledger() as writer, client.open_log("a") as log:
                async with other.open_ledger(writer.ledger_id, recover=True), other.open_log("a"):
                    pass
                adding, appending = writer.add_entry(b"1"), log.append(b"1")
                if look == "future":
                    with pytest.raises(client_aio.LedgerFencedError):
                        await adding
                    with pytest.raises(client_aio.LogFencedError):
                        await appending
                else:
                    with pytest.raises(client_aio.LedgerFencedError):
                        await writer.flush()
                    with pytest.raises(client_aio.LogFencedError):
                        await log.flush()


async def test_leaving_raises_a_failure_that_the_application_has_not_seen(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:

        async def leave_a_ledger() -> None:
            async with client.create_ledger() as writer:
                async with other.open_ledger(writer.ledger_id, recover=True):
                    pass
                await asyncio.wait([writer.add_entry(b"1")])

        async def leave_a_log() -> None:
            async with client.open_log("a") as log:
                async with other.open_log("a"):
                    pass
                await asyncio.wait([log.append(b"1")])

        with pytest.raises(client_aio.LedgerFencedError):
            await leave_a_ledger()
        with pytest.raises(client_aio.LogFencedError):
            await leave_a_log()
