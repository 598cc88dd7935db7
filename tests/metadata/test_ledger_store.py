"""Ledgers in a metadata store, on each kind of store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from metadata.access.bookies import SetBack, SetBacks
from metadata.access.ledgers import LedgerStore
from metadata.errors import (
    LedgerExistsError,
    MetadataCorruptError,
    NoSuchLedgerError,
    VersionConflictError,
)
from metadata.ids import LEDGER_ID_MAX, ledger_key
from metadata.model.ledger import LedgerMetadata

if TYPE_CHECKING:
    from metadata.store import Guard, MetadataStore, Version
    from tests.metadata.conftest import Backend


def ledger(ledger_id: int) -> LedgerMetadata:
    return LedgerMetadata.new(ledger_id, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1"])


async def test_a_tag_is_set_beside_other_changes(store: MetadataStore) -> None:
    class Late(LedgerStore):
        """Another client closes the ledger between the read and the first compare-and-set."""

        async def compare_and_set(
            self,
            metadata: LedgerMetadata,
            version: Version,
            *,
            token: str | None = None,
            guard: Guard | None = None,
        ) -> Version:
            if len(tokens) == 1:
                await super().compare_and_set(ledger(7).close(-1, 0), version)
            return await super().compare_and_set(metadata, version, token=token, guard=guard)

    def draw_token() -> str:
        tokens.append(f"t{len(tokens)}")
        return tokens[-1]

    tokens: list[str] = []
    ledgers = Late(store)
    await ledgers.create_ledger(ledger(7))
    await ledgers.tag(7, "key", b"value", draw_token=draw_token)
    metadata, after = await ledgers.read(7)
    assert (metadata.is_closed, metadata.custom, len(tokens)) == (True, {"key": b"value"}, 2)
    await ledgers.tag(7, "key", b"value", draw_token=draw_token)
    assert (await ledgers.read(7))[1] == after
    with pytest.raises(NoSuchLedgerError):
        await ledgers.tag(8, "key", b"value", draw_token=draw_token)


async def test_a_ledger_is_created_once_read_changed_and_deleted(store: MetadataStore) -> None:
    ledgers = LedgerStore(store)
    version = await ledgers.create_ledger(ledger(7), token="t")
    assert await ledgers.create_ledger(ledger(7), token="t") == version
    with pytest.raises(LedgerExistsError) as exists:
        await ledgers.create_ledger(ledger(7))
    assert exists.value.ledger_id == 7
    assert await ledgers.read(7) == (ledger(7), version)
    closed = ledger(7).close(-1, 0)
    later = await ledgers.compare_and_set(closed, version)
    with pytest.raises(VersionConflictError):
        await ledgers.compare_and_set(closed, version)
    assert await ledgers.read(7) == (closed, later)
    with pytest.raises(VersionConflictError):
        await ledgers.delete(7, version)
    await ledgers.delete(7, later)
    for gone in (ledgers.read(7), ledgers.delete(7), ledgers.compare_and_set(closed, later)):
        with pytest.raises(NoSuchLedgerError) as missing:
            await gone
        assert missing.value.ledger_id == 7


async def test_the_walk_gives_all_ledgers_in_order(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    ledgers = LedgerStore(one)
    assert [each async for each in ledgers.ledger_ids()] == []
    ids = [0, 7, 9_999, 10_000, 10_001, 123_456_789_012, LEDGER_ID_MAX]
    for ledger_id in reversed(ids):
        await ledgers.create_ledger(ledger(ledger_id))
    assert [each async for each in LedgerStore(two).ledger_ids(sync=True)] == ids
    for first in [*ids, 1, 8, 10_002, 123_456_789_011, LEDGER_ID_MAX - 1]:
        expected = [each for each in ids if each >= first]
        assert [each async for each in LedgerStore(one).ledger_ids(first=first)] == expected
    await ledgers.delete(10_000)
    await ledgers.delete(123_456_789_012)
    ids = [each for each in ids if each not in (10_000, 123_456_789_012)]
    assert [each async for each in LedgerStore(two).ledger_ids(sync=True)] == ids


async def test_a_ledger_deleted_during_the_walk_does_not_end_it(store: MetadataStore) -> None:
    ledgers = LedgerStore(store)
    for ledger_id in (1, 20_000, 40_000):
        await ledgers.create_ledger(ledger(ledger_id))
    seen = []
    async for ledger_id in ledgers.ledger_ids():
        seen.append(ledger_id)
        if ledger_id == 1:
            await ledgers.delete(20_000)
    assert seen == [1, 40_000]


async def test_metadata_of_another_ledger_or_of_none_is_a_typed_error(store: MetadataStore) -> None:
    ledgers = LedgerStore(store)
    await store.create(ledger_key(7), ledger(8).to_json())
    with pytest.raises(MetadataCorruptError, match="8"):
        await ledgers.read(7)
    await store.create("ledgers/000/0000/0000/0000/stray", b"1")
    with pytest.raises(MetadataCorruptError, match="stray"):
        [each async for each in ledgers.ledger_ids()]


async def test_ledger_ids_are_drawn_in_blocks_and_never_twice(backend: Backend) -> None:
    clients = [LedgerStore(await backend.open(), ids_drawn=4) for _ in range(2)]
    drawn = await asyncio.gather(*(clients[n % 2].allocate_id() for n in range(30)))
    assert len(set(drawn)) == 30


async def test_a_watch_of_a_ledger_tells_of_its_change(backend: Backend) -> None:
    one, two = LedgerStore(await backend.open()), LedgerStore(await backend.open())
    version = await one.create_ledger(ledger(7))
    changes = two.watch(7)
    await anext(changes)
    waiting = asyncio.ensure_future(anext(changes))
    await one.compare_and_set(ledger(7).close(-1, 0), version)
    async with asyncio.timeout(20):
        await waiting
    assert (await two.read(7))[0].is_closed
    await changes.aclose()


async def test_no_ledger_is_created_below_the_floor(backend: Backend) -> None:
    """A client's ids were drawn before the floor was raised, and are used after it."""
    ledgers, other = LedgerStore(await backend.open()), LedgerStore(await backend.open())
    first = await ledgers.allocate_id()
    await ledgers.create_ledger(ledger(first))
    assert (await ledgers.floor(), await other.floor()) == (0, 0)
    late, later = await ledgers.allocate_id(), await other.allocate_id()
    for floor in (late + 1, 1, late + 1):  # it never falls
        await other.raise_floor(floor)
        assert (await ledgers.floor(), await other.floor()) == (late + 1, late + 1)
    with pytest.raises(LedgerExistsError, match="no ledger is created under the id"):
        await ledgers.create_ledger(ledger(late))
    assert [each async for each in other.ledger_ids(sync=True)] == [first]
    drawn = await ledgers.allocate_id()  # the block that held the late id is lost
    assert drawn > later
    await ledgers.create_ledger(ledger(drawn))
    await other.create_ledger(ledger(later))
    assert [each async for each in other.ledger_ids(sync=True)] == [first, later, drawn]


async def test_no_ledger_is_created_below_the_event_of_a_set_back(store: MetadataStore) -> None:
    """The id may have been given out, or be gone, since the copy; the floor is that of the copy."""
    ledgers = LedgerStore(store)
    drawn = await ledgers.allocate_id()
    await SetBacks().replace(store, [SetBack("token", "b1", 1, drawn + 1, [], {})])
    with pytest.raises(LedgerExistsError, match="no ledger is created under the id"):
        await ledgers.create_ledger(ledger(drawn))
    assert [each async for each in ledgers.ledger_ids(sync=True)] == []
    await ledgers.create_ledger(ledger(drawn + 1))


async def test_a_ledger_that_a_raise_of_the_floor_overtakes_is_taken_back(store: MetadataStore) -> None:
    """The floor is raised, and the ledgers are listed, while the creation is under way."""
    ledgers = LedgerStore(store)
    create = store.create

    async def overtaken(key: str, value: bytes, *, token: str | None = None) -> Version:
        if key == ledger_key(7):
            await LedgerStore(store).raise_floor(8)
        return await create(key, value, token=token)

    vars(store)["create"] = overtaken
    with pytest.raises(LedgerExistsError):
        await ledgers.create_ledger(ledger(7))
    assert [each async for each in ledgers.ledger_ids(sync=True)] == []
