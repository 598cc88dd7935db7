"""Unbounded ledgers, end to end: takeovers, fragments, readers that follow, trimming, sealing, deleting."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import client_aio
from client_aio import LedgerState
from metadata.ids import unbounded_key
from tests.support.cluster import Cluster
from tests.support.links import Gate, Links
from tests.support.unbounded import NAME, WAIT_S, clients, everything, numbered

if TYPE_CHECKING:
    from pathlib import Path

    from client_aio.ledger.entry_reader import EntryStream


async def take(entries: EntryStream, count: int) -> list[tuple[int, bytes]]:
    """Return the next entries of a reader that follows."""

    async def next_ones() -> list[tuple[int, bytes]]:
        return [tuple(await anext(entries)) for _ in range(count)]

    return await asyncio.wait_for(next_ones(), WAIT_S)


async def rolled(ledger: client_aio.UnboundedLedgerWriter, data: list[bytes]) -> None:
    """Add entries, and begin a fragment behind them."""
    await ledger.add_entries(data)
    assert await ledger.roll() == ledger.last_add_confirmed + 1
    await ledger.add_entry(b"first of a fragment")
    assert ledger.metadata.last_fragment.first_entry == ledger.last_add_confirmed


# --- takeovers ---


async def test_a_ledger_goes_on_under_one_writer_after_another(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        async with one.open_unbounded_ledger(NAME, custom_metadata={"app": b"x"}) as ledger:
            assert (ledger.term, ledger.last_add_confirmed, ledger.length) == (1, -1, 0)
            assert await ledger.add_entries(numbered(0, 9)) == (0, 9)
            assert [entry.data async for entry in ledger.read(0, 9)] == numbered(0, 9)
            length = ledger.length
        async with other.open_unbounded_ledger(NAME, create=False) as ledger:
            assert (ledger.term, ledger.last_add_confirmed, ledger.length) == (2, 9, length)
            assert await ledger.add_entry(b"10") == 10
            assert [entry.data async for entry in ledger.read(0, 10)] == numbered(0, 10)
            assert ledger.metadata.custom == {"app": b"x"}
            assert [f.content_term for f in ledger.metadata.fragments] == [1, 2]
        assert await everything(one) == list(enumerate(numbered(0, 10)))
        assert [each async for each in one.list_unbounded_ledgers()] == [(NAME, ledger.ledger_id)]


async def test_a_writer_that_lives_is_shut_out_and_what_it_had_acknowledged_is_kept(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        former = await one.open_unbounded_ledger(NAME)
        await former.add_entries(numbered(0, 4))
        ledger = await other.open_unbounded_ledger(NAME)
        late = former.add_entry(b"late")
        with pytest.raises(client_aio.LedgerFencedError, match="taken over") as fenced:
            await asyncio.wait_for(late, WAIT_S)
        assert fenced.value.outcome.value == "unknown"
        with pytest.raises(client_aio.LedgerFencedError):
            await former.close()
        with pytest.raises(client_aio.LedgerFencedError):
            await former.trim(3)
        await ledger.add_entry(b"5")
        await ledger.close()
        assert await everything(one) == list(enumerate(numbered(0, 5)))


async def test_an_empty_fragment_is_replaced_at_each_takeover(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        for client in (one, other, one, other):
            ledger = await client.open_unbounded_ledger(NAME)
        assert [(f.first_entry, f.content_term) for f in ledger.metadata.fragments] == [(0, 4)]
        await ledger.add_entry(b"0")
        ledger = await one.open_unbounded_ledger(NAME)
        ledger = await one.open_unbounded_ledger(NAME)
        assert [(f.first_entry, f.content_term) for f in ledger.metadata.fragments] == [(0, 4), (1, 6)]
        assert ledger.length == 1


async def test_takeovers_at_the_same_time_leave_one_writer_and_one_truth(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        async with one.open_unbounded_ledger(NAME) as ledger:
            await ledger.add_entries(numbered(0, 9))
        opening = [client.open_unbounded_ledger(NAME) for client in (one, other) * 4]
        opened = await asyncio.gather(*opening, return_exceptions=True)
        writers = [each for each in opened if isinstance(each, client_aio.UnboundedLedgerWriter)]
        assert {type(each) for each in opened} <= {
            client_aio.UnboundedLedgerWriter, client_aio.LedgerFencedError,
        }  # fmt: skip
        assert len({writer.term for writer in writers}) == len(writers)
        adding = [writer.add_entry(b"of term %d" % writer.term) for writer in writers]
        added = await asyncio.gather(*adding, return_exceptions=True)
        acknowledged = {each: index for index, each in enumerate(added) if isinstance(each, int)}
        last = max(writers, key=lambda writer: writer.term)
        if not acknowledged:  # the last one was overtaken by one that failed afterwards
            last = await one.open_unbounded_ledger(NAME)
            await last.add_entry(b"at last")
        await last.close()
        found = dict(await everything(other))
        assert [found[n] for n in range(10)] == numbered(0, 9)
        for entry_id, index in acknowledged.items():
            assert found[entry_id] == b"of term %d" % writers[index].term


async def test_the_end_that_nobody_acknowledged_is_found_and_kept_under_its_own_term(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, cluster):
        former = await one.open_unbounded_ledger(NAME)
        await former.add_entries(numbered(0, 2))
        await former.abort()  # nobody published the LAC: all of it has to be found
        ledger = await other.open_unbounded_ledger(NAME)
        assert ledger.last_add_confirmed == 2
        assert [(f.first_entry, f.content_term) for f in ledger.metadata.fragments] == [(0, 1), (3, 2)]
        await cluster.kill()
        await cluster.start()
        assert await everything(other) == list(enumerate(numbered(0, 2)))


async def test_a_takeover_without_enough_bookies_fails_and_the_next_one_succeeds(tmp_path: Path) -> None:
    async with clients(tmp_path, bookies=5, connect_timeout_s=1) as (one, other, cluster):
        ledger = await one.open_unbounded_ledger(NAME)
        await ledger.add_entries(numbered(0, 9))
        await ledger.abort()  # else it replaces them
        lost = ledger.metadata.last_fragment.bookies[:2]
        await asyncio.gather(*(cluster[name].kill() for name in lost))
        with pytest.raises(client_aio.LedgerRecoveryError, match=lost[0]):
            await other.open_unbounded_ledger(NAME)
        metadata = await other.ledger_metadata(NAME)
        assert (metadata.state, metadata.term) == (LedgerState.OPEN, 1)  # Nobody was fenced.
        await cluster[lost[0]].start()
        ledger = await other.open_unbounded_ledger(NAME)
        assert (ledger.term, ledger.last_add_confirmed) == (2, 9)
        # The new fragment does without the one that is still gone.
        assert lost[1] not in ledger.metadata.last_fragment.bookies
        await ledger.add_entry(b"10")


async def test_a_bookie_that_fails_is_replaced_under_the_same_content_term(tmp_path: Path) -> None:
    async with clients(tmp_path, bookies=4) as (one, other, cluster):
        ledger = await one.open_unbounded_ledger(NAME)
        await ledger.add_entries(numbered(0, 9))
        await cluster[ledger.metadata.last_fragment.bookies[0]].kill()
        await ledger.add_entries(numbered(10, 19))  # which two bookies of three may acknowledge
        async with asyncio.timeout(WAIT_S):
            while len(ledger.metadata.fragments) == 1:
                await one.ledger_metadata(NAME)
        await ledger.close()
        fragments = ledger.metadata.fragments
        assert len(fragments) == 2
        assert {f.content_term for f in fragments} == {1}
        assert await everything(other) == list(enumerate(numbered(0, 19)))
        async with other.open_unbounded_ledger(NAME) as again:
            assert again.last_add_confirmed == 19


# --- fragments ---


async def test_fragments_are_rolled_by_size_and_lose_no_order(tmp_path: Path) -> None:
    async with clients(tmp_path, bookies=6) as (one, other, _):
        async with one.open_unbounded_ledger(NAME, fragment_bytes=20_000) as ledger:
            done: list[int] = []
            async with asyncio.timeout(WAIT_S):
                count = 0
                while len(ledger.metadata.fragments) <= 3 or count < 600:
                    data = b"%d" % count * 100
                    ledger.add_entry(data).add_done_callback(lambda add: done.append(add.result()))
                    if count % 5 == 0:
                        await one.ledger_metadata(NAME)
                    count += 1
            await ledger.flush()
        assert done == list(range(count))
        fragments = ledger.metadata.fragments
        assert {f.content_term for f in fragments} == {1}
        assert len({name for f in fragments for name in f.bookies}) > 3
        assert await everything(other) == [(n, b"%d" % n * 100) for n in range(count)]
        async with other.open_unbounded_ledger(NAME) as again:
            assert (again.last_add_confirmed, again.length) == (count - 1, ledger.length)


async def test_a_roll_goes_on_with_the_same_bookies_where_there_are_no_others(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, cluster):
        ledger = await one.open_unbounded_ledger(NAME)
        await rolled(ledger, numbered(0, 4))
        await cluster["b2"].kill()
        await ledger.add_entry(b"without b2")
        before = ledger.metadata.last_fragment
        assert await asyncio.wait_for(ledger.roll(), WAIT_S) > before.first_entry
        await asyncio.wait_for(ledger.add_entries(numbered(0, 4)), WAIT_S)
        await ledger.close()
        assert set(ledger.metadata.last_fragment.bookies) == {"b1", "b2", "b3"}
        found = await everything(other)
        assert [entry_id for entry_id, _ in found] == list(range(12))


async def test_a_bookie_that_fails_while_a_roll_waits_for_it_is_replaced_and_the_roll_made(
    tmp_path: Path,
) -> None:
    async with clients(tmp_path, bookies=4) as (one, other, cluster):
        ledger = await one.open_unbounded_ledger(NAME, ensemble_size=2, write_quorum=2, ack_quorum=2)
        await ledger.add_entries(numbered(0, 3))
        before = ledger.metadata.last_fragment
        cluster[before.bookies[0]].stop()
        waiting = ledger.add_entry(b"4")
        rolling = asyncio.create_task(ledger.roll())
        for _ in range(500_000):
            if ledger._window.is_holding:
                break
            await asyncio.sleep(0)
        assert ledger._window.is_holding
        await cluster[before.bookies[0]].kill()
        assert await asyncio.wait_for(rolling, WAIT_S) == 5
        assert await waiting == 4
        assert before.bookies[0] not in ledger.metadata.fragments[-2].bookies
        await ledger.add_entries(numbered(5, 9))
        await ledger.close()
        assert [data for _, data in await everything(other)] == numbered(0, 9)


async def test_a_bulk_add_and_a_close_wait_for_the_roll_under_way(tmp_path: Path) -> None:
    async with clients(tmp_path, max_in_flight_bytes=50_000) as (one, other, _):
        async with one.open_unbounded_ledger(NAME, fragment_bytes=30_000) as ledger:
            for n in range(0, 500, 25):
                assert await ledger.add_entries(b"x" * 1000 for _ in range(25)) == (n, n + 24)
            rolling = asyncio.create_task(ledger.roll())
            await asyncio.sleep(0)
            ledger.add_entry(b"last")
        await asyncio.gather(rolling, return_exceptions=True)  # the close may have come first
        assert len(ledger.metadata.fragments) > 3
        assert len(await everything(other)) == 501


# --- readers ---


async def test_a_reader_follows_over_terms_and_fragments_and_ends_with_the_seal(tmp_path: Path) -> None:
    async with clients(tmp_path, bookies=6) as (one, other, _):
        ledger = await one.open_unbounded_ledger(NAME)
        async with aclosing(other.read_unbounded_ledger(NAME)) as entries:
            expected = numbered(0, 3)
            await ledger.add_entries(expected)
            assert await take(entries, 4) == list(enumerate(expected))
            await rolled(ledger, [b"4"])
            assert await take(entries, 2) == [(4, b"4"), (5, b"first of a fragment")]
            ledger = await one.open_unbounded_ledger(NAME)
            await ledger.add_entry(b"6")
            assert await take(entries, 1) == [(6, b"6")]
            for n in range(7, 12):
                async with other.open_unbounded_ledger(NAME) as ledger:
                    await ledger.add_entry(b"%d" % n)
            assert await take(entries, 5) == list(enumerate(numbered(7, 11), 7))
            async with other.open_unbounded_ledger(NAME) as ledger:
                await ledger.add_entry(b"12")
                await ledger.close(seal=True)
            assert await take(entries, 1) == [(12, b"12")]
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(anext(entries), WAIT_S)


async def test_a_reader_that_waits_in_the_middle_of_nowhere_sees_the_last_entry(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        ledger = await one.open_unbounded_ledger(NAME)
        await ledger.add_entry(b"0")
        async with aclosing(other.read_unbounded_ledger(NAME, 1)) as entries:
            waiting = asyncio.create_task(take(entries, 1))
            await asyncio.sleep(0)
            await ledger.add_entry(b"1")
            await ledger.close()  # publishes the LAC, since no later entry will
            assert await waiting == [(1, b"1")]


async def test_a_reader_of_a_bounded_ledger_is_sent_to_the_right_method(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, _, _):
        async with one.create_ledger() as ledger:
            await ledger.add_entry(b"0")
        with pytest.raises(client_aio.InvalidArgumentError, match="bounded"):
            await everything(one, name=ledger.ledger_id)
        with pytest.raises(client_aio.InvalidArgumentError, match="bounded"):
            await one.open_unbounded_ledger(ledger.ledger_id)
        async with one.open_unbounded_ledger(NAME) as unbounded:
            await unbounded.add_entry(b"0")
        with pytest.raises(client_aio.InvalidArgumentError, match="open_unbounded_ledger"):
            await one.open_ledger(NAME, recover=True)
        async with one.open_ledger(NAME) as reader:
            assert [entry.data async for entry in reader.read(0, 0)] == [b"0"]


# --- trimming, sealing, deleting ---


async def test_trimming_drops_whole_fragments_and_tells_readers(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        ledger = await one.open_unbounded_ledger(NAME)
        for n in range(4):
            await rolled(ledger, numbered(n * 10 + 1, n * 10 + 9))
        starts = [fragment.first_entry for fragment in ledger.metadata.fragments]
        assert starts == [0, 9, 19, 29, 39]
        reader = await other.open_ledger(NAME)
        assert await ledger.trim(8) == 0
        assert await ledger.trim(20) == 19
        assert (await other.ledger_metadata(NAME)).first_entry == ledger.first_entry == 19
        with pytest.raises(client_aio.NoSuchEntryError, match="begins at entry 19"):
            await everything(other)
        with pytest.raises(client_aio.NoSuchEntryError, match="begins at entry 19"):
            async with aclosing(other.read_unbounded_ledger(NAME, 5)) as entries:
                await anext(entries)
        async with aclosing(other.read_unbounded_ledger(NAME, None)) as entries:
            assert [entry_id for entry_id, _ in await take(entries, 21)] == list(range(19, 40))
        assert await ledger.trim(10**9) == 39
        await ledger.add_entry(b"40")
        async with other.open_unbounded_ledger(NAME) as ledger:
            assert (ledger.first_entry, ledger.last_add_confirmed) == (39, 40)
        # Whoever was there before reads what bookies still have, or is told.
        await reader.refresh()
        with pytest.raises(client_aio.NoSuchEntryError, match="begins at"):
            await anext(reader.read(0, 3))


async def test_a_sealed_ledger_is_never_taken_over_again(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        async with one.open_unbounded_ledger(NAME) as ledger:
            await ledger.add_entries(numbered(0, 4))
            sealed = await ledger.close(seal=True)
        assert (sealed.state, sealed.last_entry, sealed.length) == (LedgerState.CLOSED, 4, 5)
        with pytest.raises(client_aio.LedgerClosedError, match="sealed at entry 4"):
            await other.open_unbounded_ledger(NAME)
        reader = await other.open_ledger(NAME)
        assert (reader.is_closed, reader.last_add_confirmed, reader.length) == (True, 4, 5)
        assert await everything(other) == list(enumerate(numbered(0, 4)))


async def test_a_ledger_that_was_left_is_opened_again_to_be_sealed(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, _, _):
        ledger = await one.open_unbounded_ledger(NAME)
        await ledger.add_entry(b"0")
        await ledger.close()
        await ledger.close()
        with pytest.raises(client_aio.LedgerClosedError):
            await ledger.add_entry(b"1")
        with pytest.raises(client_aio.LedgerClosedError, match="open it again"):
            await ledger.close(seal=True)
        with pytest.raises(client_aio.LedgerClosedError):
            await ledger.trim(1)


async def test_a_deleted_ledger_is_gone_with_its_name_and_the_next_of_that_name_is_another(
    tmp_path: Path,
) -> None:
    async with clients(tmp_path) as (one, other, _):
        ledger = await one.open_unbounded_ledger(NAME)
        await rolled(ledger, numbered(0, 3))
        async with aclosing(other.read_unbounded_ledger(NAME)) as entries:
            await take(entries, 4)
            await other.delete_ledger(NAME)
            with pytest.raises(client_aio.NoSuchLedgerError):
                await take(entries, 5)
        with pytest.raises(client_aio.BookKeeperError):
            await asyncio.wait_for(ledger.add_entry(b"late"), WAIT_S)
        with pytest.raises(client_aio.NoSuchLedgerError, match=NAME):
            await one.open_unbounded_ledger(NAME, create=False)
        async with one.open_unbounded_ledger(NAME) as again:
            assert again.ledger_id != ledger.ledger_id
            assert await again.add_entry(b"0") == 0


# --- what may be asked for ---


async def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, _, _):
        for wrong in ("", "7", "a/b", -1, 2**63):
            with pytest.raises(client_aio.InvalidArgumentError):
                one.open_unbounded_ledger(wrong)
        with pytest.raises(client_aio.InvalidArgumentError, match="guaranteed_write_quorum"):
            one.open_unbounded_ledger(NAME, guaranteed_write_quorum=True)
        with pytest.raises(client_aio.InvalidArgumentError, match="fragment_bytes"):
            one.open_unbounded_ledger(NAME, fragment_bytes=0)
        with pytest.raises(client_aio.InvalidArgumentError):
            one.read_unbounded_ledger(NAME, -1)
        with pytest.raises(client_aio.NoSuchLedgerError):
            await one.open_unbounded_ledger(4711)


async def test_a_password_is_needed_to_take_over(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        ledger = await one.open_unbounded_ledger(NAME, password=b"secret")
        await ledger.add_entries(numbered(0, 4))
        for wrong in (b"", b"guess"):
            with pytest.raises(client_aio.UnauthorizedAccessError):
                await other.open_unbounded_ledger(NAME, password=wrong)
        await ledger.add_entry(b"5")  # nobody has fenced it
        async with other.open_unbounded_ledger(NAME, password=b"secret") as ledger:
            await ledger.add_entry(b"6")
        async with aclosing(one.read_unbounded_ledger(NAME, follow=False, password=b"secret")) as entries:
            assert [entry.data async for entry in entries] == numbered(0, 6)


async def test_a_ledger_whose_end_nobody_can_tell_does_not_end_early(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.open_unbounded_ledger("a")
        await ledger.add_entry(b"1")
        await ledger.abort()
        for bookie_id in ("b1", "b2", "b3"):
            await cluster[bookie_id].kill()
        with pytest.raises(client_aio.BookieUnavailableError):
            await anext(client.read_unbounded_ledger("a", follow=False))


async def test_a_name_whose_ledger_was_deleted_by_a_call_cut_off_is_swept(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        for name in (NAME, "another"):
            async with one.open_unbounded_ledger(name) as ledger:
                await ledger.add_entry(b"0")
        store, ledgers = one._context.ledgers.store, one._context.ledgers
        await ledgers.delete((await one.ledger_metadata(NAME)).ledger_id)  # and the process is gone
        assert (await store.read(unbounded_key(NAME))).value
        assert not (await other.sweep_log_orphans()).failures
        with pytest.raises(client_aio.NoSuchKeyError):
            await store.read(unbounded_key(NAME))
        assert [name async for name, _ in other.list_unbounded_ledgers()] == ["another"]
        async with other.open_unbounded_ledger(NAME) as ledger:
            assert await ledger.add_entry(b"anew") == 0


@pytest.mark.parametrize("is_held", [True, False])
async def test_who_loses_the_name_takes_his_ledger_back_unless_somebody_holds_it(
    tmp_path: Path, is_held: bool
) -> None:
    async with (
        Cluster(tmp_path, bookies=3) as cluster,
        Links(cluster.uri) as links,
        links.connect("maker") as maker,
        client_aio.connect(cluster.uri) as other,
    ):
        gate = Gate(unbounded_key(NAME))
        links.store("maker").before_create = gate.meet
        making = asyncio.ensure_future(maker.open_unbounded_ledger(NAME))
        await asyncio.wait_for(gate.reached.wait(), WAIT_S)
        (nameless,) = [ledger_id async for ledger_id in other.list_ledgers()]
        async with other.open_unbounded_ledger(NAME) as named:
            await named.add_entry(b"named")
        if is_held:
            async with other.open_unbounded_ledger(nameless) as held:
                await held.add_entries(numbered(0, 9))  # acknowledged
        gate.opened.set()
        ledger = await asyncio.wait_for(making, WAIT_S)
        assert ledger.ledger_id == named.ledger_id
        if is_held:
            assert await everything(other, name=nameless) == list(enumerate(numbered(0, 9)))
        else:
            assert [each async for each in other.list_ledgers()] == [ledger.ledger_id]
