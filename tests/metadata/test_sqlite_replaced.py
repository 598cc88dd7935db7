"""The SQLite store while the file is replaced, taken away, or set back to an older copy."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

import pytest

from metadata.backends.sqlite.leases import boot_id
from metadata.backends.sqlite.store import SqliteMetadataStore
from metadata.backends.sqlite.tables import Tables
from metadata.errors import (
    GuardChangedError,
    MetadataUnavailableError,
    NoSuchKeyError,
    VersionConflictError,
)
from metadata.store import Guard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

WAIT_S = 30


def copy(source: Path, to: Path) -> Path:
    """Make a copy as docs/OPERATING.md has it; put into a store that is open, it replaces the contents."""
    with closing(sqlite3.connect(source)) as store, closing(sqlite3.connect(to)) as other:
        store.backup(other)
    return to


def replace(path: Path, by: Path) -> None:
    """Put another file in the place of the store's."""
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.replace(by, path)


async def until(store: SqliteMetadataStore, key: str, is_met: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so, which a change of the key goes along with."""
    async with asyncio.timeout(WAIT_S), aclosing(store.watch(key)) as changes:
        async for _ in changes:
            if await is_met():
                return


def then(monkeypatch: pytest.MonkeyPatch, method: str, do: Callable[[], object]) -> None:
    """Do something once, in the worker, right after the next call of a method of `Tables`."""
    real = getattr(Tables, method)

    def called(*values: Any) -> Any:
        try:
            return real(*values)
        finally:
            monkeypatch.undo()
            do()

    monkeypatch.setattr(Tables, method, called)


async def test_a_store_goes_on_with_the_file_that_was_put_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        version = await store.create("a", b"1")
        older = copy(path, tmp_path / "older")
        await store.compare_and_set("a", b"2", version)
        await store.create("b", b"1")
        replace(path, older)
        async with await SqliteMetadataStore.open(path) as other:
            await other.create("c", b"1")
            assert await store.children("") == ["a", "c"]
            await store.compare_and_set("a", b"3", version)
            assert (await other.read("a")).value == b"3"
            with pytest.raises(NoSuchKeyError):
                await store.read("b")
    with closing(sqlite3.connect(path)) as left:
        assert left.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_each_kind_of_call_is_made_on_the_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "m.db"

    async def missing(call: Awaitable[object]) -> None:
        with pytest.raises(NoSuchKeyError):
            await call

    async with await SqliteMetadataStore.open(path) as store:
        older = copy(path, tmp_path / "older")
        version = await store.create("a", b"1")
        assert list(await store.allocate_ids("x", 8)) == list(range(8))
        for call in (
            lambda: missing(store.read("a")),
            lambda: missing(store.age_s("a")),
            lambda: missing(store.compare_and_set("a", b"2", version)),
            lambda: missing(store.delete("a")),
            lambda: store.create("a", b"1"),
            lambda: store.create_missing([("a", b"1")]),
        ):
            replace(path, copy(older, tmp_path / "put"))
            await call()
        replace(path, copy(older, tmp_path / "put"))
        assert await store.ids_drawn("x") == 0
        replace(path, copy(older, tmp_path / "put"))
        assert list(await store.allocate_ids("x", 1)) == [0]


async def test_a_key_is_not_missing_because_the_file_of_before_lacked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        newer = copy(path, tmp_path / "newer")
        async with await SqliteMetadataStore.open(newer) as other:
            await other.create("a", b"1")
        then(monkeypatch, "read", lambda: replace(path, newer))
        assert (await store.read("a")).value == b"1"


async def test_a_write_is_made_in_the_file_that_comes_before_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        older = copy(path, tmp_path / "older")
        then(monkeypatch, "_put", lambda: replace(path, older))
        await store.create("a", b"1")
        async with await SqliteMetadataStore.open(path) as other:
            assert (await other.read("a")).value == b"1"


async def test_a_write_whose_file_is_replaced_behind_its_commit_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        older = copy(path, tmp_path / "older")
        then(monkeypatch, "create", lambda: replace(path, older))
        with pytest.raises(MetadataUnavailableError, match="was replaced while"):
            await store.create("a", b"1", token="mine")
        await store.create("a", b"1", token="mine")
        async with await SqliteMetadataStore.open(path) as other:
            assert await other.children("") == ["a"]


async def test_a_refusal_by_the_file_of_before_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        first = await store.create("a", b"1")
        older = copy(path, tmp_path / "older")
        await store.compare_and_set("a", b"2", first)
        await store.create("b", b"1")
        then(monkeypatch, "compare_and_set", lambda: replace(path, copy(older, tmp_path / "put")))
        await store.compare_and_set("a", b"3", first)  # a conflict in the file of before
        await store.create("b", b"1")
        then(monkeypatch, "create", lambda: replace(path, copy(older, tmp_path / "put")))
        await store.create("b", b"1")


async def test_watches_fire_when_the_file_is_another_one(tmp_path: Path) -> None:
    """Also where another client has brought the copy to the same count of changes."""
    path = tmp_path / "m.db"
    async with (
        await SqliteMetadataStore.open(path) as store,
        aclosing(store.watch("a")) as changes,
        aclosing(store.watch("missing")) as others,
    ):
        version = await store.create("a", b"1")
        older = copy(path, tmp_path / "older")
        await store.compare_and_set("a", b"2", version)
        await anext(changes)
        await anext(others)
        following = [asyncio.ensure_future(anext(each)) for each in (changes, others)]
        async with await SqliteMetadataStore.open(older) as other:
            await other.compare_and_set("a", b"3", version)
        replace(path, older)
        await asyncio.wait_for(asyncio.gather(*following), WAIT_S)
        assert (await store.read("a")).value == b"3"


async def test_while_the_file_is_away_no_call_counts_and_none_is_made(tmp_path: Path) -> None:
    path, away = tmp_path / "m.db", tmp_path / "away"
    async with await SqliteMetadataStore.open(path, lease_s=0.4) as store:
        await store.register("b/1", b"1")
        os.replace(path, away)
        for call in (store.read("b/1"), store.read("a"), store.create("a", b"1"), store.children("b")):
            with pytest.raises(MetadataUnavailableError, match="is gone"):
                await call
        assert not path.exists()
        os.replace(away, path)
        assert (await store.read("b/1")).value == b"1"
        await store.create("a", b"1")
        os.replace(path, away)
    assert not path.exists()


async def test_a_file_that_is_still_being_copied_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        for number in range(40):
            await store.create(f"a/{number}", b'"%b"' % (b"x" * 500))
        whole = copy(path, tmp_path / "older").read_bytes()
        for suffix in ("-wal", "-shm", ""):
            (tmp_path / f"m.db{suffix}").unlink()
        with path.open("wb") as copying:
            for begin in range(0, len(whole), 4096):
                with pytest.raises(MetadataUnavailableError, match=r"cannot be used"):
                    await store.read("a/7")
                copying.write(whole[begin : begin + 4096])
                copying.flush()
        await store.read("a/7")


async def test_a_log_of_another_file_is_not_read_into_this_one(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        older = copy(path, tmp_path / "older")
        await store.create("a", b"1")
        os.replace(older, path)
        for _ in range(2):
            with pytest.raises(MetadataUnavailableError, match="was left"):
                await store.create("b", b"1")
        for suffix in ("-wal", "-shm"):
            (tmp_path / f"m.db{suffix}").unlink()
        assert await store.children("") == []


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_a_log_that_was_removed_alone_is_told(tmp_path: Path, suffix: str) -> None:
    """Others would begin another one, and neither side would see what the other one commits."""
    path = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(path) as store:
        await store.create("a", b"1")
        (tmp_path / f"m.db{suffix}").unlink()
        with pytest.raises(MetadataUnavailableError, match="while it was in use"):
            await store.create("b", b"1")
    async with await SqliteMetadataStore.open(path) as store:
        assert await store.children("") == ["a"]


async def test_a_file_that_a_link_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    link = tmp_path / "m.db"
    async with await SqliteMetadataStore.open(tmp_path / "old" / "m.db") as store:
        await store.create("a", b"1")
    copy(tmp_path / "old" / "m.db", tmp_path / "new" / "m.db")
    link.symlink_to(tmp_path / "old" / "m.db")
    async with await SqliteMetadataStore.open(link) as store:
        await store.create("b", b"1")
        link.unlink()
        link.symlink_to(tmp_path / "new" / "m.db")
        assert await store.children("") == ["a"]
        (tmp_path / "new" / "m.db-wal").unlink()
        with pytest.raises(MetadataUnavailableError, match="while it was in use"):
            await store.children("")


async def test_a_version_of_before_a_set_back_is_no_version_of_what_was_written_behind_it(
    tmp_path: Path,
) -> None:
    """Both are the second change of one key. A writer would overwrite the end that a recovery has found."""
    path = tmp_path / "m.db"
    async with (
        await SqliteMetadataStore.open(path) as store,
        await SqliteMetadataStore.open(path) as other,
    ):
        first = await store.create("a", b'"open"')
        guarded = await store.create("b", b"1")
        older = copy(path, tmp_path / "older")
        version = await store.compare_and_set("a", b'"more"', first)
        copy(older, path)
        theirs = await other.compare_and_set("a", b'"closed"', first)
        assert version != theirs
        with pytest.raises(VersionConflictError, match="set back"):
            await store.compare_and_set("a", b'"still open"', version)
        with pytest.raises(VersionConflictError):
            await store.delete("a", version)
        with pytest.raises(GuardChangedError):
            await store.compare_and_set("b", b"2", guarded, guard=Guard("a", version))
        assert (await store.read("a")) == (b'"closed"', theirs)


# Registrations


async def test_what_a_set_back_removes_is_registered_again(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    async with (
        await SqliteMetadataStore.open(path, lease_s=0.4) as store,
        await SqliteMetadataStore.open(path, lease_s=0.4) as other,
    ):
        older = copy(path, tmp_path / "older")
        await store.register("b/1", b"1")
        session, before = store.session, (await other.read("b/1")).version.writers
        copy(older, path)

        async def is_back() -> bool:
            return await other.children("b") == ["1"] and (await other.read("b/1")).version.writers != before

        await until(other, "b", is_back)
        assert store.session == session


@pytest.mark.parametrize("leases_stay", [True, False], ids=["leases stay", "leases removed"])
async def test_what_was_registered_comes_back_in_another_file(tmp_path: Path, leases_stay: bool) -> None:
    path = tmp_path / "m.db"
    async with (
        await SqliteMetadataStore.open(path, lease_s=0.4) as store,
        await SqliteMetadataStore.open(path, lease_s=0.4) as other,
    ):
        await store.create("b/other", b"1")
        older = copy(path, tmp_path / "older")
        await store.register("b/1", b"1")
        session = store.session
        if not leases_stay:
            for name in os.listdir(tmp_path):
                if name.startswith("m.db-leases-"):
                    (tmp_path / name).unlink()
        replace(path, older)

        async def is_back() -> bool:
            owners = await other._submit(other._tables.owners)
            is_listed = await other.children("b") == ["1", "other"]
            return is_listed and owners == [store.session] and (leases_stay or owners != [session])

        await until(other, "b", is_back)
        assert (tmp_path / f"m.db-leases-{boot_id()}").exists()
        for each in (store, other):
            await each._remove_dead()
        assert await is_back()


async def test_a_set_back_leaves_the_present_registrations_and_no_others(tmp_path: Path) -> None:
    """One that has ended since the copy would be held for as long as the session lives."""
    path = tmp_path / "m.db"
    async with (
        await SqliteMetadataStore.open(path, lease_s=0.4) as store,
        await SqliteMetadataStore.open(path, lease_s=0.4) as other,
    ):
        bookie = await store.register("b/1", b'"of before"')
        lock = await store.register("locks/7", b"1")
        older = copy(path, tmp_path / "older")
        await lock.close()
        await bookie.update(b'"of now"')
        copy(older, path)

        async def is_mended() -> bool:
            values = [(await other.read("b/1")).value, await other.children("locks")]
            return values == [b'"of now"', []]

        await until(other, "locks", is_mended)
        await (await other.register("locks/7", b"2")).close()
