"""A log's writer that loses two of its three bookies, or the log: what becomes of each append."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from benchmarks.healing import Round, run_round
from client_aio import (
    BookKeeperError,
    InvalidArgumentError,
    LedgerRecoveryError,
    LogFencedError,
    OperationTimeoutError,
    Outcome,
    Position,
    RecordsLostError,
    WriterState,
)
from client_aio.ledger.recovery import recover_ledger
from client_aio.log import takeover
from tests.integration.test_log_ends import until_listed
from tests.support.healing import LASTS_S, bring_back, hold_up, lose_two, state_is, stop_two

if TYPE_CHECKING:
    from client_aio import Client
    from tests.support.cluster import Cluster

QUICK = client_aio.ClientConfig(add_timeout_s=1.0, read_timeout_s=1.0, connect_timeout_s=1.0)


async def contents(client: Client) -> list[bytes]:
    return [bytes(record.data) async for record in client.read_log("a")]


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("way", ["alone", "with a roll", "with a takeover"])
async def test_a_thousand_appends_take_effect_once_over_a_loss(cluster: Cluster, way: str, how: str) -> None:
    config = QUICK if how == "stop" else client_aio.ClientConfig()
    async with (
        client_aio.connect(cluster.uri, config=config) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        this = Round(1, way, how, away_s=2.5)
        await run_round(cluster, client, other, this)
        assert not this.faults
        if way != "with a takeover":
            assert this.counts() == {"acknowledged": 1000}


async def test_a_writer_says_what_it_is_doing(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a")
        seen: list[WriterState] = []

        async def follow() -> None:
            seen.extend([state async for state in log.states()])

        following = asyncio.create_task(follow())
        await log.append(b"1")
        assert log.state is WriterState.WRITING
        await lose_two(cluster)
        outstanding = log.append(b"2")
        await state_is(log, WriterState.HEALING)
        held = log.append(b"3")
        assert log.bytes_in_flight > 0
        await bring_back(cluster)
        async with asyncio.timeout(LASTS_S):
            assert await outstanding < await held
            assert log.last_add_confirmed == await held
            assert log.rolls == 1
            await log.close()
            await following
        assert seen == [
            WriterState.WRITING, WriterState.HEALING, WriterState.WRITING, WriterState.CLOSED,
        ]  # fmt: skip
        assert await contents(client) == [b"1", b"2", b"3"]


async def test_a_writer_that_heals_is_fenced_once_another_has_the_log(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        log = await client.open_log("a")
        await log.append(b"1")
        healing = asyncio.Event()
        go_on = asyncio.Event()
        reads = log._lists.read

        async def read_late(**options: bool) -> object:
            healing.set()
            await go_on.wait()  # between the failure and the list that decides
            return await reads(**options)

        log._lists.read = read_late
        stop_two(cluster)
        cut_off = log.append(b"2")
        await lose_two(cluster)
        async with asyncio.timeout(LASTS_S):
            await healing.wait()
            held = log.append(b"3")
            await bring_back(cluster)
            while True:
                with contextlib.suppress(BookKeeperError):
                    async with other.open_log("a") as taken:
                        await taken.append(b"other")
                    break
            go_on.set()
            with pytest.raises(LogFencedError) as failed:
                await held
            assert failed.value.outcome is Outcome.UNKNOWN
            await asyncio.wait([cut_off])
        assert log.state is WriterState.FENCED
        with pytest.raises(LogFencedError):
            await log.close()
        await log.abort()
        is_in = cut_off.exception() is None  # The takeover has decided that.
        assert is_in or isinstance(cut_off.exception(), LogFencedError)
        assert await contents(other) == ([b"1", b"2", b"other"] if is_in else [b"1", b"other"])


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_writer_that_waits_for_bookies_hears_at_once_that_another_has_the_log(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        log = await client.open_log("a")
        await log.append(b"1")
        waits = hold_up(monkeypatch, takeover, client)
        stop_two(cluster)
        cut_off = log.append(b"2")
        await lose_two(cluster)
        async with asyncio.timeout(LASTS_S):
            await waits.wait()
            held = log.append(b"3")
            await bring_back(cluster)
            if is_deleted:
                await other.delete_log("a")
            else:
                async with other.open_log("a") as taken:
                    await taken.append(b"other")
            with pytest.raises(LogFencedError):
                await held
            await asyncio.wait([cut_off])
        assert log.state is WriterState.FENCED
        with pytest.raises(LogFencedError):
            await log.close()
        await log.abort()
        is_in = cut_off.exception() is None  # The takeover has decided that.
        assert is_in or isinstance(cut_off.exception(), LogFencedError)
        if not is_deleted:
            assert await contents(other) == ([b"1", b"2", b"other"] if is_in else [b"1", b"other"])


@pytest.mark.parametrize("is_fenced", [False, True])
async def test_a_ledger_that_was_closed_with_a_loss_completes_no_append(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_fenced: bool
) -> None:
    async with (
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri, connect_timeout_s=1.0, read_timeout_s=2.0) as other,
    ):
        log = await client.open_log("a")
        await log.append(b"1")
        go_on, reads = asyncio.Event(), log._lists.read

        async def read_late(**options: bool) -> object:
            await go_on.wait()
            return await reads(**options)

        monkeypatch.setattr(log._lists, "read", read_late)
        failed = log.ledger_id
        stop_two(cluster)
        cut_off = log.append(b"2")  # One bookie may take it: fewer than Qa.
        await lose_two(cluster)
        async with asyncio.timeout(LASTS_S):
            await state_is(log, WriterState.HEALING)
            held = log.append(b"3")
            async with other.open_ledger(failed, recover=True, accept_loss=True) as reader:
                assert reader.metadata.given_up is not None
            if is_fenced:
                await bring_back(cluster)
                async with other.open_log("a") as taken:
                    await taken.append(b"other")
            go_on.set()
            for future in (cut_off, held):
                with pytest.raises(RecordsLostError) as lost:
                    await future
                assert lost.value.outcome is Outcome.UNKNOWN
            if is_fenced:
                await state_is(log, WriterState.FENCED)  # The loss is known before the takeover.
                with pytest.raises(LogFencedError):
                    await log.close()
                await log.abort()
                return
            with pytest.raises(RecordsLostError):
                await log.flush()
            await bring_back(cluster)
            await state_is(log, WriterState.WRITING)
            position = await log.append(b"4")
            assert position.ledger_id != failed
            await log.close()


async def test_a_ledger_whose_end_is_known_waits_for_no_other_and_may_be_truncated(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        log = await client.open_log("a", roll_entries=8)
        failed = (await log.append(b"1")).ledger_id
        _, ahead = await until_listed(other, 2)
        is_away = True

        async def recover(context: Any, ledger_id: int, *arguments: Any, **options: Any) -> None:
            while ledger_id == ahead and is_away:
                if (await other.ledger_metadata(failed)).is_closed:
                    raise LedgerRecoveryError("a bookie was lost in between")
                await asyncio.sleep(0)
            await recover_ledger(context, ledger_id, *arguments, **options)

        monkeypatch.setattr(takeover, "recover_ledger", recover)
        stop_two(cluster)
        cut_off = log.append(b"2")  # One bookie takes it.
        await lose_two(cluster)
        async with asyncio.timeout(LASTS_S):
            await state_is(log, WriterState.HEALING)
            held = log.append(b"3")
            await cluster["b1"].start()  # Two that deny the record would be enough for an end before it.
            assert await cut_off == Position(failed, 1)
            assert log.state is WriterState.HEALING
            await cluster["b2"].start()
            await other.truncate_log("a", Position(ahead, 0))
            is_away = False
            assert (await held).ledger_id > ahead
            await log.close()
        assert await contents(other) == [b"3"]


async def test_appends_whose_ledger_was_closed_and_truncated_meanwhile_fail_and_later_ones_go_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        log = await client.open_log("a", roll_entries=8)
        failed = (await log.append(b"1")).ledger_id
        _, ahead = await until_listed(other, 2)
        go_on, reads = asyncio.Event(), log._lists.read

        async def read_late(**options: bool) -> object:
            await go_on.wait()
            return await reads(**options)

        monkeypatch.setattr(log._lists, "read", read_late)
        stop_two(cluster)
        cut_off = log.append(b"2")
        await lose_two(cluster)
        async with asyncio.timeout(LASTS_S):
            await state_is(log, WriterState.HEALING)
            held = log.append(b"3")
            await bring_back(cluster)
            async with other.open_ledger(failed, recover=True):
                await other.truncate_log("a", Position(ahead, 0))
            go_on.set()
            for future in (cut_off, held):
                with pytest.raises(RecordsLostError) as lost:
                    await future
                assert lost.value.outcome is Outcome.UNKNOWN
                assert lost.value.ledger_id == failed
            with pytest.raises(RecordsLostError):
                await log.flush()
            await state_is(log, WriterState.WRITING)
            await log.append(b"4")
            await log.close()
        assert await contents(other) == [b"4"]


async def test_overdue_appends_fail_together_and_later_ones_go_on(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a", append_timeout_s=1.0)
        await log.append(b"1")
        await lose_two(cluster)
        overdue = [log.append(b"2")]
        await state_is(log, WriterState.HEALING)
        overdue += [log.append(b"3"), log.append(b"4")]
        async with asyncio.timeout(LASTS_S):
            for future in overdue:
                with pytest.raises(OperationTimeoutError, match="may be there") as failed:
                    await future
                assert failed.value.outcome is Outcome.UNKNOWN
            assert not log.is_closed
            with pytest.raises(OperationTimeoutError):
                await log.flush()
            await bring_back(cluster)
            while log.state is not WriterState.WRITING:
                await state_is(log, WriterState.WRITING)
            await log.append(b"5")
            await log.close()
        found = await contents(client)
        assert found in ([b"1", b"2", b"5"], [b"1", b"5"])


async def test_a_failure_that_nobody_looked_at_is_raised_at_the_end(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a", append_timeout_s=1.0)
        await lose_two(cluster)
        lost = log.append(b"1")
        async with asyncio.timeout(LASTS_S):
            await asyncio.wait([lost])
            await bring_back(cluster)
            await state_is(log, WriterState.WRITING)
            with pytest.raises(OperationTimeoutError):
                async with log:
                    log.append(b"2")
        await log.abort()


async def test_a_writer_that_heals_can_be_aborted_and_its_client_closed(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        logs = [await client.open_log(name) for name in "ab"]
        await lose_two(cluster)
        futures = [log.append(b"1") for log in logs]
        for log in logs:
            await state_is(log, WriterState.HEALING)
        await logs[0].abort()
    async with asyncio.timeout(LASTS_S):
        for log, future in zip(logs, futures, strict=True):
            with pytest.raises(BookKeeperError) as failed:
                await future
            assert failed.value.outcome is Outcome.UNKNOWN
            assert log.state is WriterState.CLOSED


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "1", True])
async def test_the_timeout_of_appends_is_a_positive_number(cluster: Cluster, wrong: object) -> None:
    async with client_aio.connect(cluster.uri) as client:
        with pytest.raises(InvalidArgumentError, match="append_timeout_s"):
            client.open_log("a", append_timeout_s=wrong)


async def test_a_writer_that_heals_again_and_again_warns_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """One of three bookies is down, and another one comes and goes."""
    async with client_aio.connect(cluster.uri) as client:
        log = await client.open_log("a")
        await cluster["b1"].kill()
        caplog.set_level("WARNING", "client_aio")
        for number in range(3):
            await cluster["b2"].kill()
            appended = log.append(b"%d" % number)
            await state_is(log, WriterState.HEALING)
            await cluster["b2"].start()
            await state_is(log, WriterState.WRITING)
            await asyncio.wait_for(appended, LASTS_S)
        warned = [re.sub(r"ledger=?.?\d+", "ledger", record.getMessage()) for record in caplog.records]
        kinds = Counter(line.split(":")[0] for line in warned)
        assert set(kinds.values()) == {1}, kinds
        await log.close()
