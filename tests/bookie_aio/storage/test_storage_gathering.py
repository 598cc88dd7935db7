"""What a read or a listing looks at: all that matters up to the horizon, and little beyond it."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bookie_aio.storage import repair_writes
from bookie_aio.storage.disk.file_cache import FileCache
from bookie_aio.storage.read import reader
from bookie_aio.storage.read.reader import gather, list_runs
from bookie_aio.storage.repair_writes import OutdatedBlockError, store_missing, store_unless_outdated
from bookie_aio.storage.segment import index, segment
from bookie_aio.storage.segment.format import SegmentHeader
from bookie_aio.storage.segment.index import Run, Runs, pack_run
from bookie_aio.storage.segment.segment import Segment
from bookie_aio.storage.segment.segment_set import Source
from bookie_aio.wire.listing import ROW
from metadata.ids import ENTRY_ID_MAX
from tests.support.storage import Store, make_block

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from bookie_aio.storage.read.reader import ListedRun, StoredCopy

Shape = tuple[int, int, int, int]  # first entry, entries, stride, content term


class CountedRuns(Runs):
    """Counts the runs that it gives."""

    given = 0

    def parts(self, low: int, high: int, count_max: int) -> Iterator[list[Run]]:
        for part in super().parts(low, high, count_max):
            self.given += len(part)
            yield part


def sources_of(segments: Iterable[Iterable[Shape]]) -> list[Source]:
    """Return sources, as `Segments.find` does, of segments whose index is in memory."""
    file_cache = FileCache(None, 1)  # nothing is read
    sources = []
    for segment_id, shapes in enumerate(segments, 1):
        runs = CountedRuns()
        for offset, (first, entries, stride, content_term) in enumerate(shapes):
            run = Run(first, content_term, offset, entries, stride, 96, 10)
            runs.add(first, run.last, 106, pack_run(*run))
        held_in = Segment("", SegmentHeader(segment_id, 0, 0), file_cache)
        sources.append(Source(runs.firsts[0], held_in, runs))
    return sorted(sources, key=lambda source: source.lowest)


def runs_given(sources: Iterable[Source]) -> int:
    return sum(source.runs.given for source in sources if isinstance(source.runs, CountedRuns))


def named(found: Iterable[StoredCopy]) -> list[tuple[int, int]]:
    """Name runs by segment and offset."""
    return [(one.segment_id, one.offset) for one in found]


@pytest.fixture
async def store(tmp_path: Path) -> Store:
    """Return a store with entries 0, 2, … 398 of ledger 1, each a run of its own, in several segments."""
    opened = await Store.open(tmp_path / "b1")
    for entry_id in range(0, 400, 2):
        opened.engine.append_block(make_block(1, entry_id, [b"held" * 200]), lambda _: None)
    await opened.barrier()
    return opened


shapes = st.tuples(
    st.one_of(st.integers(0, 60), st.sampled_from([7, 7, 30])),
    st.integers(1, 12),
    st.sampled_from([1, 1, 2, 3]),
    st.integers(0, 2),
)
segments_of_runs = st.lists(st.lists(shapes, min_size=1, max_size=30), min_size=1, max_size=6)


@pytest.mark.pure
@given(
    segments=segments_of_runs,
    low=st.integers(0, 70),
    span=st.integers(0, 70),
    count_max=st.integers(1, 20),
    turn=st.integers(1, 40),
)
@settings(max_examples=300, deadline=None)
def test_all_runs_up_to_the_horizon_are_gathered(
    segments: list[list[Shape]], low: int, span: int, count_max: int, turn: int
) -> None:
    high = low + span
    with patch.object(index, "RUNS_PER_STEP", turn):
        found, horizon = asyncio.run(gather(sources_of(segments), low, high, count_max))
    assert low <= horizon <= high
    everything = [
        (first, first + (entries - 1) * stride, segment_id, offset)
        for segment_id, held in enumerate(segments, 1)
        for offset, (first, entries, stride, _) in enumerate(held)
    ]
    expected = [(one[2], one[3]) for one in everything if one[0] <= horizon and one[1] >= low]
    assert sorted(named(found)) == sorted(expected)
    firsts = [one.run.first for one in found]
    assert firsts == sorted(firsts)
    assert sum(first > low for first in firsts) <= count_max
    if horizon < high:  # no nearer than it has to be
        assert sum(low < first <= horizon + 1 for first, *_ in everything) > count_max


def terms_of(rows: Iterable[tuple[int, int, int, int]]) -> dict[int, int]:
    """Return the highest content term of each entry listed."""
    terms: dict[int, int] = {}
    for first, content_term, entries, stride in rows:
        for entry_id in range(first, first + entries * stride, stride):
            terms[entry_id] = max(content_term, terms.get(entry_id, 0))
    return terms


@pytest.mark.pure
@given(
    segments=segments_of_runs,
    from_entry=st.integers(0, 70),
    to_entry=st.one_of(st.integers(0, 70), st.just(ENTRY_ID_MAX)),
    rows_max=st.integers(1, 12),
    turn=st.integers(1, 40),
)
@settings(max_examples=300, deadline=None)
def test_listings_name_each_entry_held_and_its_content_term(
    segments: list[list[Shape]], from_entry: int, to_entry: int, rows_max: int, turn: int
) -> None:
    async def list_all() -> list[ListedRun]:
        listed: list[ListedRun] = []
        at = from_entry
        while at >= 0:
            rows, following = await list_runs(sources_of(segments), at, to_entry, rows_max)
            firsts = [row[0] for row in rows]
            assert firsts == sorted(firsts)
            assert all(at <= first <= to_entry for first in firsts)
            assert len(set(firsts[rows_max - 1 :])) <= 1
            assert following == -1 or at < following <= to_entry
            listed += rows
            at = following
        return listed

    with patch.object(index, "RUNS_PER_STEP", turn):
        found = terms_of(asyncio.run(list_all()))
    held = terms_of(
        (first, term, entries, stride) for each in segments for first, entries, stride, term in each
    )
    for terms in (found, held):
        for entry_id in [one for one in terms if not from_entry <= one <= to_entry]:
            del terms[entry_id]
    assert found == held


@pytest.mark.pure
async def test_what_is_gathered_of_many_segments_is_little_more_than_of_one() -> None:
    segments = [[(2 * (number * 40 + at), 1, 1, 0) for number in range(500)] for at in range(40)]
    sources = sources_of(segments)
    found, horizon = await gather(sources, 0, ENTRY_ID_MAX, 100)
    assert (len(found), horizon) == (101, 201)
    assert runs_given(sources) < 1000
    sources = sources_of(segments)
    rows, following = await list_runs(sources, 0, ENTRY_ID_MAX, 100)
    assert (rows, following) == ([(2 * number, 0, 1, 1) for number in range(100)], 200)
    assert runs_given(sources) < 1000


@pytest.mark.pure
async def test_many_copies_of_one_entry_are_gathered_together_and_end() -> None:
    """They are all needed to tell which one counts; the horizon goes round them, and on."""
    sources = sources_of([(3, 1, 1, 0), *[(7, 1, 1, 0)] * 50, (9, 1, 1, 0)] for _ in range(5))
    found, horizon = await gather(sources, 0, 20, 10)
    assert (len(found), horizon) == (5, 6)
    found, horizon = await gather(sources, 7, 20, 3)
    assert (len(found), horizon) == (250, 8)
    found, horizon = await gather(sources, 9, 20, 3)
    assert (len(found), horizon) == (5, 20)


@pytest.mark.pure
async def test_runs_that_come_while_others_are_looked_at_hide_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "RUNS_PER_STEP", 2)
    (source,) = sources_of([[(first, 1, 1, 0) for first in range(0, 100, 10)]])
    runs = source.runs
    assert runs is not None
    found: list[Run] = []
    offsets = count(1000)
    for part in runs.parts(0, 99, 100):
        found += part
        for first in (0, part[-1].first, 5, 100):
            run = Run(first, 0, next(offsets), 1, 1, 96, 10)
            runs.add(first, first, 106, pack_run(*run))
    assert [run.first for run in found if run.offset < 1000] == list(range(0, 100, 10))
    assert len(set(found)) == len(found)


class Turns:
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def stop(self) -> int:
        self._handle.cancel()
        return self.count


@pytest.mark.pure
async def test_the_loop_is_not_held_while_many_runs_are_looked_at(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.settled()
    sealed = [one for one in await store.engine._lookup.sources(1, 0, 399) if one.sealed is not None]
    for module in (index, reader, segment):
        monkeypatch.setattr(module, "RUNS_PER_STEP", 10)
    turns = Turns()  # one long look in memory, of one wide run and others that end below it
    (source,) = sources_of([[(0, 100, 10, 0), *((first, 1, 1, 0) for first in range(1000))]])
    assert len(await source.overlapping(990, 999, 100)) == 11
    assert turns.stop() >= 90
    turns = Turns()  # in sealed indexes whose pages are in memory
    assert len(sealed) > 2
    for source in sealed:
        await source.overlapping(0, 399, 1000)
    assert turns.stop() >= len(sealed)
    many = sources_of([(2 * number, 1, 1, 0)] for number in range(100))
    turns = Turns()  # in many sources, of one run each
    await gather(many, 0, 1000, 1000)
    assert (looking := turns.stop()) >= 10
    turns = Turns()
    await list_runs(many, 0, ENTRY_ID_MAX, 1000)
    assert turns.stop() >= looking + 10
    await store.close()


@pytest.mark.pure
async def test_a_row_names_no_more_entries_than_its_count_can_say() -> None:
    half = 2**31
    whole = sources_of([[(0, half, 1, 0)], [(half, half - 1, 1, 0)]])
    assert await list_runs(whole, 0, ENTRY_ID_MAX, 10) == ([(0, 0, 2**32 - 1, 1)], -1)
    more = sources_of([[(0, half, 1, 0)], [(half, half, 1, 0)], [(2 * half, 5, 1, 0)]])
    rows, following = await list_runs(more, 0, ENTRY_ID_MAX, 10)
    assert (rows, following) == ([(0, 0, half, 1), (half, 0, half + 5, 1)], -1)
    assert all(ROW.pack(*row) for row in rows)


async def test_a_listing_ends_where_it_was_told_to(store: Store) -> None:
    held = [(entry_id, 0, 1, 1) for entry_id in range(0, 400, 2)]
    list_entries = store.engine.list_entries
    assert await list_entries(1, 10, 100, to_entry=14) == (held[5:8], -1)
    assert await list_entries(1, 10, 100, to_entry=15) == (held[5:8], -1)
    assert await list_entries(1, 10, 2, to_entry=15) == (held[5:7], 14)
    assert await list_entries(1, 11, 100, to_entry=11) == ([], -1)
    assert await list_entries(1, 11, 100, to_entry=10) == ([], -1)
    assert await list_entries(1, 0, 1000) == (held, -1)
    await store.close()


async def test_repair_looks_at_no_more_than_its_entries(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    overlapping = Source.overlapping

    async def counted(source: Source, low: int, high: int, count_max: int) -> list[Run]:
        found = await overlapping(source, low, high, count_max)
        given.append(len(found))
        return found

    monkeypatch.setattr(Source, "overlapping", counted)
    assert await store_unless_outdated(store.engine, make_block(1, 100, [b"held"] * 40), 0) == 40
    assert sum(given) == 20  # 100, 102, … 138
    for _ in range(50):
        store.engine.append_block(make_block(2, 5, [b"same"]), lambda _: None)
        store.engine.append_block(make_block(2, 6, [b"same"]), lambda _: None)
        store.engine.append_block(make_block(2, 7, [b"same"]), lambda _: None)
    given.clear()
    assert await store_unless_outdated(store.engine, make_block(2, 5, [b"same"] * 3), 0) == 3
    assert max(given) <= 60  # the copies of one entry, and some
    await store.close()


@pytest.mark.parametrize("stride", [1, 2, 3])
async def test_repair_finds_what_is_missing_page_by_page(
    store: Store, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    monkeypatch.setattr(repair_writes, "_ROWS_AT_ONCE", 3)
    block = make_block(1, 381, [b"held" * 200] * 30, stride=stride)
    missing = [entry_id for entry_id in block.entry_ids if entry_id % 2 or entry_id >= 400]
    assert await store_missing(store.engine, block, is_trusted=True) == len(missing)
    assert await store_missing(store.engine, block, is_trusted=True) == 0
    found, _, _ = await store.read(1, 381, block.last_entry, stride=stride)
    assert sorted(found) == list(block.entry_ids)
    await store.close()


async def test_a_higher_content_term_on_a_later_page_is_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_writes, "_ROWS_AT_ONCE", 3)
    await store.add(make_block(1, 120, [b"later"], content_term=5))
    await store.add(make_block(1, 131, [b"beyond"], content_term=7))
    for storing in (
        store_missing(store.engine, make_block(1, 100, [b"held" * 200] * 31), is_trusted=True),
        store_unless_outdated(store.engine, make_block(1, 100, [b"held" * 200] * 31), 0),
    ):
        with pytest.raises(OutdatedBlockError) as caught:
            await storing
        assert caught.value.content_term == 5
    await store.close()
