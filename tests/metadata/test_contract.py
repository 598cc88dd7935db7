"""What every metadata store keeps to (`metadata.store`), checked on each kind of store alike."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from metadata.backends.sqlite import store as sqlite_store
from metadata.errors import (
    ClientClosedError,
    GuardChangedError,
    InvalidArgumentError,
    KeyExistsError,
    NoSuchKeyError,
    VersionConflictError,
)
from metadata.store import VALUE_BYTES_MAX, WRITERS_KEPT, Guard, MetadataStore, Version
from tests.metadata.conftest import still

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.metadata.conftest import Backend

PATIENCE_S = 20.0


async def value_of(store: MetadataStore, key: str) -> bytes | None:
    """Read the value; None where there is none."""
    try:
        return (await store.read(key)).value
    except NoSuchKeyError:
        return None


async def until(store: MetadataStore, key: str, value: bytes | None) -> None:
    """Wait by a watch until the key has that value (None: is gone)."""
    changes = store.watch(key)
    async with asyncio.timeout(PATIENCE_S):
        async for _ in changes:
            if await value_of(store, key) == value:
                break
    await changes.aclose()


async def next_change(changes: AsyncGenerator[None, None]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await anext(changes)


# Create and read


async def test_a_created_value_is_read_back_verbatim_by_every_client(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    text = '{ "b" : [1,2 ,"ü"],\n "a": null, "value": "\\"}" }'.encode()
    version = await one.create("ledgers/000/0001", text)
    for store in (one, two):
        await store.sync("ledgers/000/0001")
        found = await store.read("ledgers/000/0001")
        assert found.value == text
        assert found.version == version


async def test_a_key_is_created_once(backend: Backend) -> None:
    stores = [await backend.open() for _ in range(3)]
    results = await asyncio.gather(
        *(store.create("a/b", b"%d" % number) for number, store in enumerate(stores)),
        return_exceptions=True,
    )
    winners = [number for number, result in enumerate(results) if isinstance(result, Version)]
    assert len(winners) == 1
    assert sum(isinstance(result, KeyExistsError) for result in results) == 2
    assert await value_of(stores[winners[0]], "a/b") == b"%d" % winners[0]


async def test_creating_again_with_the_same_token_is_the_same_create(store: MetadataStore) -> None:
    first = await store.create("a", b"1", token="mine")
    assert first.written_by("mine")
    assert await store.create("a", b"1", token="mine") == first
    await store.compare_and_set("a", b"2", first, token="other")
    assert await store.create("a", b"1", token="mine") == first
    assert await value_of(store, "a") == b"2"
    with pytest.raises(KeyExistsError):
        await store.create("a", b"1", token="another")


async def test_reading_what_is_not_there_fails(store: MetadataStore) -> None:
    with pytest.raises(NoSuchKeyError):
        await store.read("nothing")


async def test_a_parent_has_no_value_until_it_is_given_one(store: MetadataStore) -> None:
    await store.create("top/middle/leaf", b"1")
    with pytest.raises(NoSuchKeyError):
        await store.read("top/middle")
    version = await store.create("top/middle", b"2", token="t")
    assert (await store.read("top/middle")) == (b"2", version)
    assert await store.create("top/middle", b"2", token="t") == version
    with pytest.raises(KeyExistsError):
        await store.create("top/middle", b"3")
    assert await value_of(store, "top/middle/leaf") == b"1"
    assert (
        await store.compare_and_set("top/middle", b"4", version) == (await store.read("top/middle")).version
    )


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "a/..",
        "a/\x00",
        "a/\n",
        "zookeeper",
        ".store",
        ".store/ids",
        "x" * 1001,
        7,
    ],
)
async def test_an_illegal_key_is_refused(store: MetadataStore, key: str) -> None:
    with pytest.raises(InvalidArgumentError):
        await store.create(key, b"1")
    with pytest.raises(InvalidArgumentError):
        await store.read(key)


@pytest.mark.parametrize(
    "value", [b"", b"{", b"\xff", b"nope", b"[" * 100_000, "1", b'"%b"' % (b"x" * (VALUE_BYTES_MAX - 1))]
)
async def test_an_illegal_value_is_refused(store: MetadataStore, value: bytes) -> None:
    version = await store.create("a", b"1")
    with pytest.raises(InvalidArgumentError):
        await store.create("b", value)
    with pytest.raises(InvalidArgumentError):
        await store.compare_and_set("a", value, version)
    with pytest.raises(InvalidArgumentError):
        await store.register("c", value)
    assert await store.children("") == ["a"]


async def test_the_largest_value_fits_with_all_its_writers(store: MetadataStore) -> None:
    value = b'"%b"' % (b"x" * (VALUE_BYTES_MAX - 2))
    version = await store.create("large", value, token="t" * 64)
    for number in range(WRITERS_KEPT + 1):
        version = await store.compare_and_set("large", value, version, token=f"{number:064}")
    assert await store.read("large") == (value, version)


# Compare and set


async def test_compare_and_set_succeeds_from_the_present_version_only(store: MetadataStore) -> None:
    first = await store.create("a", b"1")
    second = await store.compare_and_set("a", b"2", first)
    assert second != first
    assert await store.read("a") == (b"2", second)
    with pytest.raises(VersionConflictError):
        await store.compare_and_set("a", b"3", first)
    assert await value_of(store, "a") == b"2"


async def test_compare_and_set_of_a_missing_key_fails(store: MetadataStore) -> None:
    version = await store.create("a", b"1")
    await store.delete("a")
    with pytest.raises(NoSuchKeyError):
        await store.compare_and_set("a", b"2", version)
    assert await value_of(store, "a") is None


async def test_the_same_compare_and_set_again_gives_the_version_it_made(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    first = await one.create("a", b"1")
    second = await one.compare_and_set("a", b"2", first, token="mine")
    third = await two.compare_and_set("a", b"3", second)
    again = await one.compare_and_set("a", b"2", first, token="mine")
    assert again == second
    assert await two.read("a") == (b"3", third)
    with pytest.raises(VersionConflictError):
        await one.compare_and_set("a", b"4", again)


async def test_a_guarded_write_takes_effect_only_while_the_other_key_stays_as_it_is(
    store: MetadataStore,
) -> None:
    first = await store.create("a", b"1")
    guard = Guard("b", await store.create("b", b"1"))
    second = await store.compare_and_set("a", b"2", first, guard=guard)
    assert await store.read("a") == (b"2", second)
    await store.compare_and_set("b", b"2", guard.version)
    with pytest.raises(GuardChangedError, match="'a' is not changed: key 'b'"):
        await store.compare_and_set("a", b"3", second, guard=guard)
    assert await store.read("a") == (b"2", second)
    # A conflict comes first: the value that the caller knew is gone, whatever the guard says.
    with pytest.raises(VersionConflictError):
        await store.compare_and_set("a", b"3", first, guard=guard)


async def test_a_guarded_write_that_took_effect_is_success_although_the_guard_has_changed_since(
    store: MetadataStore,
) -> None:
    first = await store.create("a", b"1")
    guard = Guard("b", await store.create("b", b"1"))
    second = await store.compare_and_set("a", b"2", first, token="mine", guard=guard)
    await store.compare_and_set("b", b"2", guard.version)
    assert await store.compare_and_set("a", b"2", first, token="mine", guard=guard) == second


@pytest.mark.parametrize("keeps_place", [True, False], ids=["place kept", "place given up"])
async def test_a_guarded_delete_takes_effect_only_while_the_other_key_stays_as_it_is(
    store: MetadataStore, keeps_place: bool
) -> None:
    first = await store.create("a", b"1")
    guard = Guard("b", await store.create("b", b"1"))
    await store.delete("a", first, keeps_place=keeps_place, guard=guard)
    second = await store.create("a", b"2")
    await store.delete("b", guard.version, keeps_place=True)
    for is_back in (False, True):
        if is_back:
            await store.create("b", b"1")
        with pytest.raises(GuardChangedError, match="'a' is not changed: key 'b'"):
            await store.delete("a", second, keeps_place=keeps_place, guard=guard)
        with pytest.raises(GuardChangedError, match="'a' is not changed: key 'b'"):
            await store.compare_and_set("a", b"3", second, guard=guard)
        assert await store.read("a") == (b"2", second)
    # What is gone is gone, and a conflict comes first, whatever the guard says.
    with pytest.raises(VersionConflictError):
        await store.delete("a", first, guard=guard)
    with pytest.raises(NoSuchKeyError):
        await store.delete("c", guard=guard)


async def test_a_key_created_anew_never_equals_an_old_version(store: MetadataStore) -> None:
    before = await store.create("a", b"1")
    await store.delete("a")
    after = await store.create("a", b"1")
    assert before != after
    with pytest.raises(VersionConflictError):
        await store.compare_and_set("a", b"2", before)
    with pytest.raises(VersionConflictError):
        await store.delete("a", before)
    assert await store.read("a") == (b"1", after)


async def test_concurrent_counting_loses_nothing(backend: Backend) -> None:
    stores = [await backend.open() for _ in range(3)]
    await stores[0].create("count", b"0")

    async def count_up(store: MetadataStore, times: int) -> None:
        await store.sync("count")
        while times:
            value, version = await store.read("count")
            try:
                await store.compare_and_set("count", b"%d" % (int(value) + 1), version)
            except VersionConflictError:
                continue
            times -= 1

    await asyncio.gather(*(count_up(store, 10) for store in stores))
    await stores[0].sync("count")
    value, version = await stores[0].read("count")
    assert int(value) == 30
    assert len(version.writers) == WRITERS_KEPT


async def test_a_version_remembers_its_last_writers(store: MetadataStore) -> None:
    version = await store.create("a", b"0", token="w0")
    for number in range(1, WRITERS_KEPT + 3):
        version = await store.compare_and_set("a", b"%d" % number, version, token=f"w{number}")
    assert version.writers == tuple(f"w{number}" for number in range(3, WRITERS_KEPT + 3))
    assert (await store.read("a")).version.writers == version.writers


# Delete and list


async def test_delete_removes_at_the_given_version_or_at_any(store: MetadataStore) -> None:
    first = await store.create("a", b"1")
    second = await store.compare_and_set("a", b"2", first)
    with pytest.raises(VersionConflictError):
        await store.delete("a", first)
    await store.delete("a", second)
    with pytest.raises(NoSuchKeyError):
        await store.delete("a")
    with pytest.raises(NoSuchKeyError):
        await store.delete("a", second)
    await store.create("a", b"3")
    await store.delete("a")
    assert await value_of(store, "a") is None


async def test_a_deleted_key_whose_place_is_kept_is_gone_like_any_other(store: MetadataStore) -> None:
    first = await store.create("logs/a", b"1")
    await store.create("logs/b", b"2")
    with pytest.raises(VersionConflictError):
        await store.delete("logs/b", first, keeps_place=True)
    await store.delete("logs/a", first, keeps_place=True)
    assert await value_of(store, "logs/a") is None
    assert await store.names("logs") == ["b"]
    with pytest.raises(NoSuchKeyError):
        await store.delete("logs/a", first, keeps_place=True)
    with pytest.raises(NoSuchKeyError):
        await store.compare_and_set("logs/a", b"2", first)
    again = await store.create("logs/a", b"1")
    assert again.incarnation != first.incarnation
    assert await store.names("logs") == ["a", "b"]
    for token in (None, "t"):  # the latter: it may have been sent before
        with pytest.raises(VersionConflictError):
            await store.compare_and_set("logs/a", b"2", first, token=token)
    with pytest.raises(VersionConflictError):
        await store.delete("logs/a", first, keeps_place=True)
    assert not await store.vacate("logs/a", older_than_s=0.0)
    assert await store.read("logs/a") == (b"1", again)
    later = await store.compare_and_set("logs/a", b"2", again)
    assert (later.incarnation, later.number) == (again.incarnation, again.number + 1)
    assert await store.read("logs/a") == (b"2", later)


async def test_a_place_is_given_up_when_it_is_old(store: MetadataStore) -> None:
    await store.delete("logs/a", await store.create("logs/a", b"1"), keeps_place=True)
    assert not await store.vacate("logs/a", older_than_s=3600.0)
    await store.vacate("logs/a", older_than_s=0.0)
    assert await store.children("logs") == []
    assert not await store.vacate("logs/a", older_than_s=0.0)
    assert await store.create("logs/a", b"2")


async def test_a_key_with_children_is_not_deleted(store: MetadataStore) -> None:
    version = await store.create("a", b"1")
    await store.create("a/b", b"2")
    for expected in (None, version):
        with pytest.raises(InvalidArgumentError):
            await store.delete("a", expected)
    await store.delete("a/b")
    await store.delete("a", version)
    assert await store.children("") == []


async def test_children_are_names_in_order(store: MetadataStore) -> None:
    assert await store.children("a") == []
    assert await store.children("") == []
    for name in ("10", "9", "b:3181", "B"):
        await store.create(f"a/{name}/x", b"1")
    assert await store.children("a") == ["10", "9", "B", "b:3181"]
    assert await store.children("a/9/x") == []
    assert await store.children("") == ["a"]
    await store.delete("a/9/x")
    assert await store.children("a/9") == []


# Watches


async def test_a_watch_yields_at_once_and_on_every_kind_of_change(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    changes = two.watch("a/b")
    await next_change(changes)

    async def seen(what: bytes | list[str] | None) -> None:
        while True:
            await next_change(changes)
            if what in (await value_of(two, "a/b"), await two.children("a/b")):
                return

    version = await one.create("a/b", b"1")
    await seen(b"1")
    await one.compare_and_set("a/b", b"2", version)
    await seen(b"2")
    await one.create("a/b/c", b"3")
    await seen(["c"])
    await one.delete("a/b/c")
    await seen([])
    await one.delete("a/b")
    await seen(None)
    await one.create("a/b", b"4")
    await seen(b"4")
    await changes.aclose()


async def test_no_change_is_missed_however_fast_they_come(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    version = await one.create("a", b"0")

    async def follow() -> list[int]:
        seen = []
        async for _ in two.watch("a"):
            seen.append(int((await two.read("a")).value))
            if seen[-1] == 200:
                return seen
        raise AssertionError("a watch does not end")

    follower = asyncio.create_task(follow())
    for number in range(1, 201):
        version = await one.compare_and_set("a", b"%d" % number, version)
    async with asyncio.timeout(PATIENCE_S):
        seen = await follower
    assert seen == sorted(seen), "reads through one store go backwards"


async def test_many_watches_of_one_key_and_of_others_live_side_by_side(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    watches = [two.watch("x") for _ in range(5)] + [two.watch("y")]
    for each in watches:
        await next_change(each)
    await watches[0].aclose()
    await one.create("x", b"1")
    for each in watches[1:5]:
        await next_change(each)
    await one.create("y", b"1")
    await next_change(watches[5])
    for each in watches:
        await each.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_what_a_watcher_read_last_is_what_is_there(
    backend: Backend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key is made and removed again and again, while watchers come and go."""
    monkeypatch.setattr(sqlite_store, "POLL_INTERVAL_S", 0.002)  # as fast as changes come
    rng = random.Random(seed)
    one, two = await backend.open(), await backend.open()
    read: dict[int, bytes | None] = {}
    has_read = asyncio.Condition()

    async def follow(watcher: int) -> None:
        async with aclosing(two.watch("a/b")) as changes:
            async for _ in changes:
                read[watcher] = await value_of(two, "a/b")
                async with has_read:
                    has_read.notify_all()

    async with asyncio.TaskGroup() as group:
        followers = {watcher: group.create_task(follow(watcher)) for watcher in range(2)}
        for turn in range(40):
            followers.pop(turn).cancel()
            followers[turn + 2] = group.create_task(follow(turn + 2))
            for _ in range(rng.randrange(1, 5)):
                if await value_of(one, "a/b") is None:
                    await one.create("a/b", b"%d" % turn)
                else:
                    await one.delete("a/b")
                await asyncio.sleep(rng.choice((0, 0, 0, 0.002)))
            what = await value_of(one, "a/b")
            async with asyncio.timeout(PATIENCE_S), has_read:
                while any(read.get(each, b"") != what for each in followers):
                    await has_read.wait()
        for each in followers.values():
            each.cancel()


async def test_closing_the_store_ends_its_watches(backend: Backend) -> None:
    store = await backend.open()
    changes = store.watch("a")
    await next_change(changes)
    waiting = asyncio.create_task(next_change(changes))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(ClientClosedError):
        await waiting


# Registrations


async def test_a_registration_is_seen_updated_and_removed(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    registration = await one.register("bookies/available/b1", b'"here"')
    await until(two, "bookies/available/b1", b'"here"')
    assert await two.children("bookies/available") == ["b1"]
    await registration.update(b'"there"')
    await until(two, "bookies/available/b1", b'"there"')
    await registration.close()
    await registration.close()
    await until(two, "bookies/available/b1", None)
    assert await two.children("bookies/available") == []


async def test_a_registration_that_lost_its_key_leaves_alone_whoever_has_it_now(backend: Backend) -> None:
    """The next one is of the same session: only a mark tells them apart."""
    store, other = await backend.open(), await backend.open()
    lost = await store.register("alive/a", b"1")
    async with still(lost):
        await other.delete("alive/a")
        held = await store.register("alive/a", b"2")
    await lost.close()
    await other.sync("alive/a")
    assert (await other.read("alive/a")).value == b"2"
    await held.close()
    await other.sync("alive/a")
    with pytest.raises(NoSuchKeyError):
        await other.read("alive/a")


async def test_a_registration_whose_key_is_deleted_comes_back_with_the_latest_value(
    backend: Backend,
) -> None:
    one, two = await backend.open(), await backend.open()
    registration = await one.register("b/1", b"1")
    await registration.update(b"2")
    session = one.session
    await two.sync("b/1")
    await two.delete("b/1")
    await until(two, "b/1", b"2")
    assert one.session == session
    await registration.update(b"3")
    await until(two, "b/1", b"3")
    await two.delete("b/1")
    await until(two, "b/1", b"3")
    await registration.close()
    await until(two, "b/1", None)


async def test_closing_a_store_removes_its_registrations(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    await one.register("b/1", b"1")
    await one.register("b/2", b"2")
    await until(two, "b/2", b"2")
    await one.close()
    await until(two, "b/1", None)
    await until(two, "b/2", None)


async def test_the_registrations_of_a_dead_process_go_and_its_successor_takes_over(backend: Backend) -> None:
    one, two, three = [await backend.open() for _ in range(3)]
    await one.register("b/1", b"1")
    await one.register("b/2", b"2")
    backend.crash(one)
    async with asyncio.timeout(PATIENCE_S):
        await two.register("b/1", b"3")
    await until(three, "b/1", b"3")
    await until(three, "b/2", None)


async def test_a_key_held_by_a_live_session_is_not_registered(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    await one.register("b/1", b"1")
    with pytest.raises(KeyExistsError):
        await two.register("b/1", b"2")
    with pytest.raises(KeyExistsError):
        await one.register("b/1", b"2")
    await one.create("durable", b"3")
    with pytest.raises(KeyExistsError):
        await two.register("durable", b"4")
    assert await value_of(one, "b/1") == b"1"


async def test_a_registration_that_is_cancelled_leaves_no_key(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    registered = 0
    for number in range(40):
        registering = asyncio.create_task(one.register(f"b/{number}", b"1"))
        for _ in range(number):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0002 * (number % 8))
        registering.cancel()
        (outcome,) = await asyncio.gather(registering, return_exceptions=True)
        registered += not isinstance(outcome, asyncio.CancelledError)
    await two.sync("b")
    assert len(await two.children("b")) == registered


async def test_an_expired_session_registers_anew_with_the_latest_value(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    registration = await one.register("b/1", b"1")
    await registration.update(b"2")
    await until(two, "b/1", b"2")
    before = (await two.read("b/1")).version.incarnation
    changes = two.watch("b/1")
    await next_change(changes)
    await backend.expire(one)
    async with asyncio.timeout(PATIENCE_S):
        async for _ in changes:
            try:
                found = await two.read("b/1")
            except NoSuchKeyError:
                continue
            if found.version.incarnation != before:
                break
    await changes.aclose()
    assert found.value == b"2"
    await registration.update(b"3")
    await until(two, "b/1", b"3")
    await registration.close()
    await until(two, "b/1", None)


async def test_an_ephemeral_key_has_no_children(store: MetadataStore) -> None:
    await store.register("b", b"1")
    with pytest.raises(InvalidArgumentError):
        await store.create("b/c", b"2")
    with pytest.raises(InvalidArgumentError):
        await store.register("b/c", b"2")


# Ids


async def test_ids_are_given_out_once(backend: Backend) -> None:
    stores = [await backend.open() for _ in range(3)]
    assert await stores[0].allocate_ids("ledger", 5) == range(5)
    blocks = await asyncio.gather(*(stores[n % 3].allocate_ids("ledger", n + 1) for n in range(12)))
    drawn = sorted([*range(5), *(each for block in blocks for each in block)])
    assert drawn == list(range(5 + sum(range(13))))
    assert await stores[1].allocate_ids("log", 1) == range(1)


async def test_a_sequence_of_ids_is_read_and_raised(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    assert await one.ids_drawn("ledger") == 0
    assert await one.allocate_ids("ledger", 5) == range(5)
    assert await two.ids_drawn("ledger") == 5
    await two.ids_drawn("ledger", least=3)  # never down
    assert await one.ids_drawn("ledger") == 5
    await two.ids_drawn("ledger", least=2**40)
    assert await one.ids_drawn("ledger") == 2**40
    assert await one.allocate_ids("ledger", 2) == range(2**40, 2**40 + 2)
    await one.ids_drawn("unused", least=7)
    assert await two.allocate_ids("unused", 1) == range(7, 8)
    assert await two.ids_drawn("ledger") == 2**40 + 2


async def test_raising_a_sequence_and_drawing_from_it_at_once_repeats_no_id(backend: Backend) -> None:
    stores = [await backend.open() for _ in range(3)]

    async def raise_(number: int) -> None:
        await stores[number % 3].ids_drawn("ledger", least=3 * number)

    drawing = [stores[number % 3].allocate_ids("ledger", 2) for number in range(12)]
    blocks, _ = await asyncio.gather(asyncio.gather(*drawing), asyncio.gather(*map(raise_, range(12))))
    drawn = [each for block in blocks for each in block]
    assert len(set(drawn)) == 24
    assert await stores[0].ids_drawn("ledger") > max(drawn)


@pytest.mark.parametrize(("name", "least"), [("", 0), ("a/b", 1), ("a", -1), ("a", True), ("a", 2**63)])
async def test_a_wrong_end_of_a_sequence_is_refused(store: MetadataStore, name: str, least: int) -> None:
    with pytest.raises(InvalidArgumentError):
        await store.ids_drawn(name, least=least)


@pytest.mark.parametrize(
    ("name", "count"), [("a", 0), ("a", -1), ("a", True), ("a", 2**31), ("", 1), ("a/b", 1)]
)
async def test_a_wrong_block_of_ids_is_refused(store: MetadataStore, name: str, count: int) -> None:
    with pytest.raises(InvalidArgumentError):
        await store.allocate_ids(name, count)


# Clients


async def test_a_key_has_an_age_by_the_stores_own_clock(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    with pytest.raises(NoSuchKeyError):
        await one.age_s("a")
    version = await one.create("a", b"1")
    await asyncio.sleep(0.05)
    await two.create("b", b"1")
    assert 0 <= await one.age_s("b") <= await two.age_s("a")
    before = await two.age_s("a")
    await one.compare_and_set("a", b"2", version)
    assert await two.age_s("a") >= before  # it counts from the creation
    await one.delete("a")
    with pytest.raises(NoSuchKeyError):
        await one.age_s("a")


async def test_after_a_sync_everything_completed_before_is_read(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    version = await one.create("a", b"0")
    for number in range(1, 20):
        version = await one.compare_and_set("a", b"%d" % number, version)
        await two.sync("a")
        assert await two.read("a") == (b"%d" % number, version)


async def test_a_cancelled_write_leaves_the_store_usable(store: MetadataStore) -> None:
    version = await store.create("a", b"0")
    for turns in range(4):
        write = asyncio.create_task(store.compare_and_set("a", b"1", version, token=f"t{turns}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        write.cancel()
        await asyncio.gather(write, return_exceptions=True)
    # Whatever became of them: the value is one of the two, and the version still leads on.
    value, version = await store.read("a")
    assert value in (b"0", b"1")
    while True:
        try:
            await store.compare_and_set("a", b"2", version)
            break
        except VersionConflictError:
            value, version = await store.read("a")
    assert await value_of(store, "a") == b"2"


async def test_a_closed_store_refuses_everything(backend: Backend) -> None:
    store = await backend.open()
    version = await store.create("a", b"1")
    await store.close()
    await store.close()
    for operation in (
        lambda: store.create("b", b"1"),
        lambda: store.read("a"),
        lambda: store.compare_and_set("a", b"2", version),
        lambda: store.delete("a"),
        lambda: store.children("a"),
        lambda: store.register("c", b"1"),
        lambda: store.allocate_ids("d", 1),
        lambda: store.ids_drawn("d"),
        lambda: store.ids_drawn("d", least=1),
        lambda: store.sync("a"),
        lambda: anext(store.watch("a")),
    ):
        with pytest.raises(ClientClosedError):
            await operation()


async def test_a_store_is_an_async_context_manager(backend: Backend) -> None:
    async with await backend.open() as store:
        await store.create("a", json.dumps({"x": 1}).encode())
    with pytest.raises(ClientClosedError):
        await store.read("a")


async def test_the_keys_that_are_missing_are_created_and_the_others_left_alone(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    version = await store.create("a/b", b"1")
    records = [("a", b"2"), ("a/b", b"3"), ("c/d/e", b"4")]
    assert await other.create_missing(records) == ["a/b"]
    await store.sync("")
    assert await store.read("a/b") == (b"1", version)
    assert [(await store.read(key)).value for key in ("a", "c/d/e")] == [b"2", b"4"]
    assert await store.create_missing(records) == ["a", "a/b", "c/d/e"]
    with pytest.raises(InvalidArgumentError):
        await store.create_missing([("f", b"5"), ("/", b"6")])
