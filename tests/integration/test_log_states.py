"""Logs whose writers, readers and deleters meet each other in mid-step, or call what no longer fits."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from client_aio import (
    InvalidArgumentError,
    LedgerClosedError,
    LogFencedError,
    MetadataUnavailableError,
    NoSuchLogError,
    UnauthorizedAccessError,
    WriterState,
)
from client_aio.log import truncation
from client_aio.log.truncation import finish_deletion
from metadata.ids import ledger_key
from metadata.model.log import LogRow
from tests.support.links import Gate, Links

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.cluster import Cluster

WAIT_S = 30


async def test_a_follower_goes_on_behind_a_ledger_that_its_writer_does_not_come_to_closing(
    cluster: Cluster,
) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("writer") as writing,
        client_aio.connect(cluster.uri) as client,
        writing.open_log("a") as log,
        aclosing(client.read_log("a", follow=True)) as records,
    ):
        await log.append(b"1")
        assert (await anext(records)).data == b"1"
        following = asyncio.create_task(anext(records))
        await asyncio.sleep(0)
        gate = Gate(ledger_key(log.ledger_id))
        links.store("writer").before_compare_and_set = gate.meet
        rolling = asyncio.create_task(log.roll())
        await gate.reached.wait()
        await rolling
        await log.append(b"2")
        await log.flush()
        assert (await asyncio.wait_for(following, WAIT_S)).data == b"2"
        gate.opened.set()


async def test_a_follower_does_not_go_on_in_another_log_of_the_same_name(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri) as client,
        aclosing(client.read_log("a", follow=True)) as records,
    ):
        async with client.open_log("a") as log:
            await log.append(b"1")
        assert (await anext(records)).data == b"1"
        async with client.open_log("a") as log:
            await log.append(b"2")
        await client.delete_log("a")
        async with client.open_log("a") as log:
            await log.append(b"new")
        with pytest.raises(NoSuchLogError):
            await asyncio.wait_for(anext(records), WAIT_S)


async def test_a_wrong_password_deletes_no_log_that_is_written_for_the_first_time(cluster: Cluster) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("deleter") as deleting,
        client_aio.connect(cluster.uri) as client,
    ):
        await client._lists("a").create(custom={}, created_ms=1)  # as open_log does first
        gate = Gate("logs/a")
        links.store("deleter").before_compare_and_set = gate.meet
        deletion = asyncio.create_task(deleting.delete_log("a", password=b"wrong"))
        await gate.reached.wait()
        async with client.open_log("a", digest="hmac-sha256", password=b"right") as log:
            await log.append(b"1")
            gate.opened.set()
            with pytest.raises(UnauthorizedAccessError):
                await deletion
        assert [record.data async for record in client.read_log("a", password=b"right")] == [b"1"]


async def test_a_closed_log_is_not_rolled(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a")
        await log.append(b"1")
        await log.close()
        with pytest.raises(LedgerClosedError):
            await log.roll()


async def test_a_log_is_not_closed_without_end_while_the_metadata_store_is_away(cluster: Cluster) -> None:
    async with Links(cluster.uri) as links, links.connect("w", ensemble_change_timeout_s=1) as client:
        log = await client.open_log("a")
        await log.append(b"1")
        key = ledger_key(log.ledger_id)

        async def away(which: str) -> None:
            if which == key:
                raise MetadataUnavailableError("away")

        links.store("w").before_compare_and_set = away
        await log.roll()
        await log.append(b"2")
        with pytest.raises(MetadataUnavailableError):
            await asyncio.wait_for(log.close(), WAIT_S)
        await log.abort()


@pytest.mark.parametrize("at_ack_quorum", [False, True])
async def test_a_log_whose_former_ledger_could_not_be_closed_is_closed_by_another_call(
    cluster: Cluster, at_ack_quorum: bool
) -> None:
    async with Links(cluster.uri) as links, links.connect("w", ensemble_change_timeout_s=1) as client:
        log = await client.open_log("a")
        await log.append(b"1")
        former = log.ledger_id
        is_away = True

        async def away(which: str) -> None:
            if which == ledger_key(former) and is_away:
                raise MetadataUnavailableError("away")

        links.store("w").before_compare_and_set = away
        await log.roll()
        await log.append(b"2")
        for _ in range(2):
            with pytest.raises(MetadataUnavailableError):
                await asyncio.wait_for(log.close(at_ack_quorum=at_ack_quorum), WAIT_S)
        assert log.current.failure is None
        is_away = False
        await asyncio.wait_for(log.close(), WAIT_S)
        assert log.state is client_aio.WriterState.CLOSED
        for row in (await client.log_metadata("a")).rows:
            assert (await client.ledger_metadata(row.ledger_id)).is_closed
        assert [record.data async for record in client.read_log("a")] == [b"1", b"2"]


async def test_a_writer_that_rolls_keeps_the_ids_of_its_last_ledgers_only(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client.open_log("a") as log:
        for _ in range(5):
            await log.append(b"1")
            await log.roll()
        assert log._healer.opener._made == {log.ledger_id}


async def test_a_writer_goes_on_when_its_former_ledger_was_closed_unheard_and_truncated(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("w") as client,
        client_aio.connect(cluster.uri) as other,
    ):
        log = await client.open_log("a")
        await log.append(b"1")
        former = log.ledger_id
        store = links.store("w")
        really = store.compare_and_set
        is_closed, is_truncated = asyncio.Event(), asyncio.Event()

        async def lose_the_answer(key: str, *change: Any, **token: Any) -> Any:
            version = await really(key, *change, **token)
            if key == ledger_key(former) and not is_closed.is_set():
                is_closed.set()
                await is_truncated.wait()
                raise MetadataUnavailableError("lost")
            return version

        monkeypatch.setattr(store, "compare_and_set", lose_the_answer)
        await log.roll()
        at = await log.append(b"2")
        await is_closed.wait()
        await other.truncate_log("a", at)
        is_truncated.set()
        await log.roll()  # which waits for the former one's close
        await log.append(b"3")
        await log.roll()
        await log.append(b"4")
        await log.close()
        assert [record.data async for record in other.read_log("a")] == [b"2", b"3", b"4"]


NO: Any = "no"
WRONG: dict[str, Callable[[client_aio.Client, client_aio.LedgerReader], Any]] = {
    "read": lambda client, reader: reader.read(NO, 0),
    "tail": lambda client, reader: reader.tail(NO),
    "nan": lambda client, reader: client.read_log("a", float("nan")),
    "inf": lambda client, reader: client.read_log("a", float("inf")),
    "ids": lambda client, reader: client.add_to_log("a", NO),
    "transaction": lambda client, reader: client.add_to_log("a", [], transaction=NO),
    "surrogate": lambda client, reader: client.create_ledger(custom_metadata={"\ud800": b""}),
    "unbounded": lambda client, reader: client.read_unbounded_ledger("u", NO),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=list(WRONG))
async def test_what_is_no_argument_is_said_to_be_none(
    cluster: Cluster, call: Callable[[client_aio.Client, client_aio.LedgerReader], Any]
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entry(b"1")
        reader = await client.open_ledger(ledger.ledger_id)

        async def called() -> None:
            made = call(client, reader)
            if inspect.isawaitable(made):
                await made

        with pytest.raises(client_aio.InvalidArgumentError):
            await called()


async def test_finishing_a_deletion_leaves_the_next_log_of_that_name_alone(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        async with client.open_log("a") as log:
            await log.append(b"old")
        lists = client._lists("a")
        head, version = await lists.read(sync=True)
        begun = await lists.change_now(head, version, lambda found: found.delete())  # and there it dies
        async with other.open_log("a") as log:
            await log.append(b"new")
            await finish_deletion(client._context, lists, begun.head, begun.version, b"")
            await log.append(b"newer")
        assert [record.data async for record in client.read_log("a")] == [b"new", b"newer"]


async def test_a_writer_that_hears_too_late_that_its_ledger_was_listed_has_lost_the_log(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is lost, and the metadata store away from the writer for longer than its patience lasts."""
    async with (
        Links(cluster.uri) as links,
        links.connect("w", ensemble_change_timeout_s=0.5) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        log = await client.open_log("a")
        await log.append(b"1")
        store = links.store("w")
        really = store.compare_and_set
        is_listed, is_away = asyncio.Event(), True

        async def lose_the_answer(key: str, *change: Any, **token: Any) -> Any:
            if key == "logs/a" and is_away and is_listed.is_set():
                raise MetadataUnavailableError("away")
            version = await really(key, *change, **token)
            if key == "logs/a" and is_away:
                is_listed.set()
                raise MetadataUnavailableError("lost")
            return version

        monkeypatch.setattr(store, "compare_and_set", lose_the_answer)
        rolling = asyncio.create_task(log.roll())
        await is_listed.wait()
        async with other.open_log("a") as next_one:
            await next_one.append(b"2")
            for _ in range(6000):
                if any("is not listed yet" in record.message for record in caplog.records):
                    break
                await asyncio.sleep(0.01)
            is_away = False
            with pytest.raises(LogFencedError):
                await rolling
            await next_one.roll()
            await next_one.append(b"3")
        await log.abort()
        assert [record.data async for record in other.read_log("a")] == [b"1", b"2", b"3"]


async def _closed_ledger(client: client_aio.Client, data: bytes) -> int:
    async with client.create_ledger() as ledger:
        await ledger.add_entry(data)
    return ledger.ledger_id


async def test_a_repeated_addition_is_said_to_be_one_though_its_ledgers_are_truncated(
    cluster: Cluster,
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger_id = await _closed_ledger(client, b"1")
        await client.add_to_log("a", [ledger_id], transaction=("q", 1))
        async with client.open_log("a") as log:
            await client.truncate_log("a", await log.append(b"2"))
        assert (await client.add_to_log("a", [ledger_id], transaction=("q", 1))).repeated
        with pytest.raises(client_aio.NoSuchLedgerError):
            await client.add_to_log("a", [ledger_id], transaction=("q", 2))


async def test_a_ledger_that_the_log_lists_in_a_page_is_not_added_again(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger_id = await _closed_ledger(client, b"1")
        await client.add_to_log("a", [ledger_id])
        lists, ids = client._lists("a"), [await client._context.ledgers.allocate_id() for _ in range(600)]
        changed = await lists.change_now(
            *await lists.read(), lambda head: head.append(LogRow(each, each, 10**12) for each in ids)
        )
        assert ledger_id not in [row.ledger_id for row in changed.head.newest]
        async with client.open_log("a") as log:
            await log.append(b"2")
            with pytest.raises(InvalidArgumentError, match=f"has ledger {ledger_id} already"):
                await client.add_to_log("a", [ledger_id])
            await log.append(b"3")
        rows = (await client.log_metadata("a")).rows
        assert [row.ledger_id for row in rows].count(ledger_id) == 1


async def test_a_ledger_that_is_about_to_be_deleted_is_not_added_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        former, later = [await _closed_ledger(client, data) for data in (b"1", b"2")]
        await client.add_to_log("a", [former])

        async def fail(*_: object, **__: object) -> None:
            raise MetadataUnavailableError("away")

        with monkeypatch.context() as patch:
            patch.setattr(truncation, "delete_ledgers", fail)
            await client.add_to_log("a", [later], replace=True)
        with pytest.raises(client_aio.InvalidArgumentError, match="about to be deleted"):
            await client.add_to_log("a", [former])
        async with client.open_log("a") as log:
            await client.truncate_log("a", await log.append(b"3"))
        assert [record.data async for record in client.read_log("a")] == [b"3"]


@pytest.mark.parametrize(("maker", "refused"), [("log", {"orders", "archive"}), ("job", {"archive"})])
async def test_what_the_sweep_of_a_log_may_delete_is_added_to_none(
    cluster: Cluster, maker: str, refused: set[str]
) -> None:
    """One that copies a ledger with all it says of itself, or rescues a dead job's, would lose what he added.

    A log's own sweep finds it unlisted, and is on its way to delete it; that of Spark marks it first, so that
    its log may have it.
    """
    async with client_aio.connect(cluster.uri) as client:
        async with client.open_log("orders") as log:
            await log.append(b"1")
        custom = (await client.ledger_metadata(log.ledger_id)).custom
        if maker == "job":
            custom = {"spark.log": b"orders"}
        async with client.create_ledger(custom_metadata=custom) as copy:
            await copy.add_entry(b"1")
        for name in ("archive", "orders"):
            if name in refused:
                with pytest.raises(client_aio.InvalidArgumentError, match="was made for log 'orders'"):
                    await client.add_to_log(name, [copy.ledger_id])
            else:
                await client.add_to_log(name, [copy.ledger_id])


async def test_a_call_that_is_refused_for_its_arguments_fences_nobody(cluster: Cluster) -> None:
    """The refusal needs the log's list, which a takeover reads before it fences."""
    large = {"a": b"x" * 40_000}
    async with client_aio.connect(cluster.uri) as first, client_aio.connect(cluster.uri) as other:
        listed, free = await _closed_ledger(other, b"1"), await _closed_ledger(other, b"2")
        await other.add_to_log("orders", [listed])
        log = await first.open_log("orders", custom_metadata=large)
        also_large = {"b": b"x" * 40_000}
        refused: dict[str, Callable[[], Awaitable[object]]] = {
            "larger than 64 KiB": lambda: other.open_log("orders", custom_metadata=also_large),
            "metadata is larger": lambda: other.add_to_log("orders", [free], custom_metadata=also_large),
            "has ledger": lambda: other.add_to_log("orders", [listed]),
            "has ledger [0-9]+ already": lambda: other.add_to_log("orders", [listed], replace=True),
        }
        for message, call in refused.items():
            with pytest.raises(InvalidArgumentError, match=message):
                await call()
            await log.append(b"3")
            assert log.state is WriterState.WRITING, message
        await log.close()
        assert [record.data async for record in other.read_log("orders")] == [b"1", *[b"3"] * len(refused)]


async def test_a_log_that_is_replaced_is_taken_from_whoever_opened_it_meanwhile(cluster: Cluster) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("adder") as adding,
        client_aio.connect(cluster.uri) as client,
    ):
        for data in (b"1", b"2"):
            async with client.open_log("a") as log:
                at = await log.append(data)
        lists = client._lists("a")
        head, version = await lists.read(sync=True)
        await lists.change_now(head, version, lambda found: found.truncate(at, ()))  # and there it dies
        ledger_id = await _closed_ledger(client, b"3")
        changes, writers = 0, list[client_aio.LogWriter]()

        async def come_between(key: str) -> None:
            nonlocal changes
            changes += key == "logs/a"
            if key == "logs/a" and changes == 1:  # it is about to forget what was dropped
                writers.append(await client.open_log("a"))
            elif key == "logs/a" and changes == 3:  # it has, and is about to replace
                with pytest.raises(LogFencedError):
                    await writers[0].append(b"in vain")

        links.store("adder").before_compare_and_set = come_between
        await adding.add_to_log("a", [ledger_id], replace=True)
        assert changes > 3
        await writers[0].abort()
        assert [record.data async for record in client.read_log("a")] == [b"3"]


async def test_a_writer_whose_ledger_is_gone_is_told_that_it_has_lost_the_log(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        former = await client.open_log("a")
        await former.append(b"1")
        async with other.open_log("a") as log:
            await other.truncate_log("a", await log.append(b"2"))
        with pytest.raises(LogFencedError):
            await former.close()
        with pytest.raises(LogFencedError):
            await former.append(b"in vain")
        await former.abort()


async def test_closing_a_log_ends_with_its_error_when_it_is_aborted(cluster: Cluster) -> None:
    async with Links(cluster.uri) as links, links.connect("w") as client:
        log = await client.open_log("a")
        await log.append(b"1")
        gate = Gate("logs/a")
        links.store("w").before_compare_and_set = gate.meet
        rolling = asyncio.create_task(log.roll())
        await gate.reached.wait()
        closing = asyncio.create_task(log.close())
        for _ in range(10):  # It waits for the next ledger to be listed.
            await asyncio.sleep(0)
        assert log.is_closed
        await log.abort()
        with pytest.raises(client_aio.WriterAbortedError):
            await asyncio.wait_for(closing, WAIT_S)
        with pytest.raises((client_aio.WriterAbortedError, LedgerClosedError)):
            await rolling


async def test_a_log_is_closed_by_one_of_two_calls_and_cut_before_the_other_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        log = await client.open_log("a")
        await log.append(b"1")
        first = asyncio.create_task(log.close())
        really, calls = log.current.close, 0

        async def close_late(**options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                await first
                async with other.open_log("a") as next_one:
                    await other.truncate_log("a", await next_one.append(b"2"))
                raise client_aio.NoSuchLedgerError("it has been truncated")
            return await really(**options)

        monkeypatch.setattr(log.current, "close", close_late)
        await asyncio.gather(first, log.close())


async def test_who_reads_a_log_that_is_made_anew_is_told_that_it_is_gone(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        for data in (b"1", b"2", b"3"):
            async with client.open_log("a") as log:
                await log.append(data)
        async with aclosing(client.read_log("a")) as records:
            await anext(records)
            await client.delete_log("a")
            async with client.open_log("a") as log:
                await log.append(b"new")
            with pytest.raises(NoSuchLogError):
                await anext(records)


async def test_two_truncations_at_once_meet_no_ledger_that_is_gone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        for data in (b"1", b"2"):
            async with client.open_log("a") as log:
                at = await log.append(data)
        ledgers = client._context.ledgers
        really, calls = ledgers.read, 0

        async def read_late(ledger_id: int) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:  # the first one compares the password
                await other.truncate_log("a", at)
            return await really(ledger_id)

        monkeypatch.setattr(ledgers, "read", read_late)
        assert await client.truncate_log("a", at) == []
