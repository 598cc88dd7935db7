"""The published counterexamples to terms that only fence, on real bookies behind links.

Each is played twice: as we do it, where an entry's content term is part of what it is, and with bookies and
clients that do not compare content terms (`tests.support.termblind`). The second shows the divergence, so
that the first is known to be a test of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Op, Read, ReadAnswer, Stop
from metadata.ids import ledger_key
from tests.support.cluster import Cluster
from tests.support.links import Frame, Links, is_fence
from tests.support.termblind import blind_client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

WAIT_S = 30
NAME = "payments"
BLIND = pytest.mark.parametrize("is_blind", [False, True], ids=["as we do it", "terms not compared"])


class Stage:
    """Bookies, and clients with links of their own: w1, w2 … take over one after another; r reads."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.clients: dict[str, client_aio.Client] = {}

    def hold_adds(self, client: str, *bookies: str) -> None:
        """Let no add of a client reach these bookies any more, nor anything behind it."""
        for name in bookies:
            self.links[client, name].requests.hold(Op.ADD)

    async def values(self, first: int, last: int) -> list[set[bytes]]:
        """Read each entry many times, so that each bookie is asked first; gives what readers saw of each."""
        reader = await self.clients["r"].open_ledger(NAME)
        await asyncio.wait_for(until_lac(reader, last), WAIT_S)
        seen: list[set[bytes]] = [set() for _ in range(first, last + 1)]
        for _ in range(6):
            async with aclosing(reader.read(first, last)) as entries:
                async for entry in entries:
                    seen[entry.entry_id - first].add(entry.data)
        return seen


async def until_lac(reader: client_aio.LedgerReader, lac: int) -> None:
    """Wait until a reader may read up to an entry."""
    if reader.last_add_confirmed < lac:
        async with aclosing(reader.tail(0)) as entries:
            async for entry in entries:
                if entry.entry_id >= lac:
                    return


@asynccontextmanager
async def stage(
    tmp_path: Path, *clients: str, bookies: int = 3, is_blind: bool, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    cluster = Cluster(tmp_path, bookies=bookies)
    if is_blind:
        blind_client(monkeypatch)
        for bookie in cluster.bookies.values():
            bookie.module = "tests.support.termblind"
    async with cluster, Links(cluster.uri) as links:
        found = Stage(links)
        opened = [links.connect(name, connect_timeout_s=1) for name in (*clients, "r")]
        try:
            for name, client in zip((*clients, "r"), opened, strict=True):
                found.clients[name] = await client.__aenter__()
            yield found
        finally:
            for client in opened:
                await client.__aexit__(None, None, None)


async def stored(stage: Stage, client: str, bookie_id: str, add: asyncio.Future[int]) -> None:
    """Wait until a bookie has answered an add, which is not acknowledged by that."""
    answer = stage.links[client, bookie_id].answers.see(Op.ADD)
    await answer.reached()
    assert not add.done()


@BLIND
async def test_an_entry_on_one_bookie_only_and_another_one_acknowledged_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_blind: bool
) -> None:
    async with stage(tmp_path, "w1", "w2", is_blind=is_blind, monkeypatch=monkeypatch) as on:
        first = await on.clients["w1"].open_unbounded_ledger(NAME)
        at_all = [on.links["w1", name].answers.see(Op.ADD) for name in ("b1", "b2", "b3")]
        await first.add_entry(b"A")
        await asyncio.gather(*(answer.reached() for answer in at_all))
        # Entry 1 is B at b1, and on its way to the others for ever.
        on.hold_adds("w1", "b2", "b3")
        await stored(on, "w1", "b1", first.add_entry(b"B"))
        # The takeover does not hear of b1 (of what is asked there, only the handshake passes).
        on.links["w2", "b1"].requests.hold(Op.READ_LAC)
        second = await on.clients["w2"].open_unbounded_ledger(NAME)
        assert second.last_add_confirmed == 0
        assert "b1" in second.metadata.last_fragment.bookies
        assert await asyncio.wait_for(second.add_entry(b"C"), WAIT_S) == 1
        denial = on.links["r", "b1"].answers.see(Op.READ, where=denies(1))
        seen = await on.values(0, 1)
        if is_blind:
            assert seen == [{b"A"}, {b"B", b"C"}], "one position, two values"
        else:
            assert seen == [{b"A"}, {b"C"}]
            await denial.reached()  # b1 was asked, and has another entry of that id


async def test_a_handle_of_the_past_that_is_told_a_lac_reads_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first counterexample, to a reader who takes another one's word for how far it may read."""
    async with stage(tmp_path, "w1", "w2", is_blind=False, monkeypatch=monkeypatch) as on:
        first = await on.clients["w1"].open_unbounded_ledger(NAME)
        at_all = [on.links["w1", name].answers.see(Op.ADD) for name in ("b1", "b2", "b3")]
        await first.add_entry(b"A")
        await asyncio.gather(*(answer.reached() for answer in at_all))
        on.hold_adds("w1", "b2", "b3")
        await stored(on, "w1", "b1", first.add_entry(b"B"))
        reader = await on.clients["r"].open_ledger(NAME)
        on.links["w2", "b1"].requests.hold(Op.READ_LAC)
        second = await on.clients["w2"].open_unbounded_ledger(NAME)
        # A connection that answers no PING is made anew: no further one reaches b1 either.
        on.links["w2", "b1"].requests.block()
        assert await asyncio.wait_for(second.add_entry(b"C"), WAIT_S) == 1
        for name in ("b2", "b3"):  # so that nobody tells of the later term
            on.links["r", name].requests.block()
        assert reader.last_add_confirmed < 1
        seen = []
        with contextlib.suppress(client_aio.BookieUnavailableError, client_aio.EntryUnknownError):
            async with aclosing(reader.read_batches(1, 1, known_lac=1)) as batches:
                seen = [bytes(entry.data) async for batch in batches for entry in batch]
        assert seen == []


@BLIND
async def test_a_bookie_that_leaves_with_dirty_entries_and_comes_back_two_terms_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_blind: bool
) -> None:
    async with stage(
        tmp_path, "w1", "w2", "w3", "w4", bookies=4, is_blind=is_blind, monkeypatch=monkeypatch
    ) as on:
        first = await on.clients["w1"].open_unbounded_ledger(NAME)
        dirty, *others = first.metadata.last_fragment.bookies
        at_all = [on.links["w1", name].answers.see(Op.ADD) for name in (dirty, *others)]
        await first.add_entry(b"0 of term 1")
        await asyncio.gather(*(answer.reached() for answer in at_all))
        on.hold_adds("w1", *others)
        await stored(on, "w1", dirty, [first.add_entry(b"%d of term 1" % n) for n in (1, 2, 3)][-1])
        # Term 2 goes on without that bookie.
        await on.links["w2", dirty].cut()
        second = await on.clients["w2"].open_unbounded_ledger(NAME)
        assert dirty not in second.metadata.last_fragment.bookies
        assert await second.add_entry(b"1 of term 2") == 1
        await second.close()
        # In term 3 it is back in the ensemble, and does not get what is added.
        for bookie_id in sorted(set(second.metadata.last_fragment.bookies) - {others[0], others[1]}):
            await on.links["w3", bookie_id].cut()
        third = None
        while third is None or dirty not in third.metadata.last_fragment.bookies:
            third = await on.clients["w3"].open_unbounded_ledger(NAME)
        on.hold_adds("w3", dirty)
        assert await third.add_entry(b"2 of term 3") == 2
        if is_blind:
            assert (await on.values(2, 2))[0] == {b"2 of term 1", b"2 of term 3"}, "one position, two values"
        else:
            assert await on.values(0, 2) == [{b"0 of term 1"}, {b"1 of term 2"}, {b"2 of term 3"}]
        # Nor is what it left found by the next takeover, which asks it about entry 3, and one of the others.
        on.links["w4", others[0]].requests.hold(Op.READ)
        asked = on.links["w4", dirty].requests.see(Op.READ, where=asks_from(3))
        fourth = await on.clients["w4"].open_unbounded_ledger(NAME)
        await asked.reached()
        assert fourth.last_add_confirmed == (3 if is_blind else 2)


def asks_from(first: int) -> Callable[[Frame], bool]:
    """Match a read that begins with an entry or behind it."""
    return lambda frame: isinstance(frame.message, Read) and frame.message.first >= first


def denies(entry_id: int) -> Callable[[Frame], bool]:
    """Match the answer "no such entry" about an entry."""

    def matches(frame: Frame) -> bool:
        answer = frame.message
        return isinstance(answer, ReadAnswer) and (answer.stop, answer.stop_entry) == (
            Stop.NO_SUCH_ENTRY, entry_id,
        )  # fmt: skip

    return matches


def is_stale(frame: Frame) -> bool:
    """Match the answer "stale metadata"."""
    return isinstance(frame.message, ReadAnswer) and frame.message.stop == Stop.STALE_METADATA


def is_of_term_1(frame: Frame) -> bool:
    """Match a read of entries of content term 1."""
    return isinstance(frame.message, Read) and frame.message.content_term == 1


async def test_a_reader_with_metadata_of_the_past_is_told_so_and_reads_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, "w1", "w2", is_blind=False, monkeypatch=monkeypatch) as on:
        first = await on.clients["w1"].open_unbounded_ledger(NAME)
        on.hold_adds("w1", "b2", "b3")
        await stored(on, "w1", "b1", first.add_entry(b"dirty"))
        reader = await on.clients["r"].open_ledger(NAME)
        assert reader.metadata.last_fragment.content_term == 1
        on.links["w2", "b1"].requests.hold(Op.READ_LAC)
        second = await on.clients["w2"].open_unbounded_ledger(NAME)
        at_b2 = on.links["w2", "b2"].answers.see(Op.ADD)
        assert await second.add_entry(b"clean") == 0
        await at_b2.reached()
        # It asks under content term 1; b2 and b3 know better, and so does the store, once it is synced with.
        on.links["r", "b1"].requests.block()
        store = on.links.store("r")
        await store.lag(ledger_key(first.ledger_id))
        syncs = store.syncs
        told = [on.links["r", name].answers.see(Op.READ, where=is_stale) for name in ("b2", "b3")]
        async with aclosing(reader.read_unconfirmed(0, 0)) as entries:
            assert [entry.data async for entry in entries] == [b"clean"]
        assert any(answer.is_reached for answer in told)
        assert store.syncs > syncs
        assert reader.metadata.last_fragment.content_term == 2


async def test_a_lac_of_a_later_term_is_not_used_with_older_fragments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rule 13: the reader knows the ledger IN_RECOVERY under term 2, with a last fragment of content term 1.
    # The owner of term 2 opens at 0. Compared with the metadata's term, the LAC of term 2 would be used with
    # the fragment of term 1: and b1 holds an entry 0 of term 1 that nobody acknowledged.
    async with stage(tmp_path, "w1", "w2", is_blind=False, monkeypatch=monkeypatch) as on:
        first = await on.clients["w1"].open_unbounded_ledger(NAME)
        on.hold_adds("w1", "b2", "b3")
        await stored(on, "w1", "b1", first.add_entry(b"dirty"))
        on.links["w2", "b1"].requests.hold(Op.READ_LAC)
        fences = [on.links["w2", name].requests.hold(Op.READ_LAC, is_fence) for name in ("b2", "b3")]
        opening = asyncio.create_task(on.clients["w2"].open_unbounded_ledger(NAME).__aenter__())
        for fence in fences:
            await fence.reached()
        reader = await on.clients["r"].open_ledger(NAME)
        assert (reader.metadata.term, reader.metadata.last_fragment.content_term) == (2, 1)
        store = on.links.store("r")
        await store.lag(ledger_key(first.ledger_id))
        syncs = store.syncs
        for fence in fences:
            fence.release()
        second = await asyncio.wait_for(opening, WAIT_S)
        assert await second.add_entry(b"clean") == 0
        # What states the LAC is of content term 2; it is heard from b2 or b3, and sends the reader to the
        # store. A read under content term 1 would be answered by b1 alone.
        for name in ("b2", "b3"):
            on.links["r", name].requests.hold(Op.READ, where=is_of_term_1)
        async with aclosing(reader.tail(0)) as entries:
            entry = await asyncio.wait_for(anext(entries), WAIT_S)
        assert entry.data == b"clean"
        assert store.syncs > syncs
