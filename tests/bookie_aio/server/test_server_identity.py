"""Whose directory it is (rule 6), and how the bookie is found."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.config import BookieConfig
from bookie_aio.server.bookie import Bookie
from bookie_aio.server.registration import BookieRegistration
from bookie_aio.storage.disk.disk import RealDisk, RealFile
from bookie_aio.wire.messages import NO_TERM, Read, Status
from metadata.access.bookies import BookieRecord, Cookie, available_bookies, ensure_cluster
from metadata.backends.memory import MemoryTree
from metadata.errors import (
    CookieMismatchError,
    CorruptRecordError,
    DirectoryInUseError,
    InvalidArgumentError,
    KeyExistsError,
    MetadataUnavailableError,
    NoSuchClusterError,
)
from metadata.ids import KEY_COOKIES, available_key, cookie_key
from tests.support.helddisk import HeldDisk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bookie_aio.server.conftest import Bookies


class CrashError(Exception):
    """The process ends here, as far as the test is concerned."""


class CrashingDisk(HeldDisk):
    """A disk whose process dies just before its n-th change."""

    def __init__(self, changes: int) -> None:
        super().__init__()
        self._changes_left = changes

    def _change(self) -> None:
        if self._changes_left == 0:
            raise CrashError
        self._changes_left -= 1

    async def rename(self, old: str, new: str) -> None:
        self._change()
        await super().rename(old, new)

    async def sync_directory(self, path: str) -> None:
        self._change()
        await super().sync_directory(path)

    async def make_directory(self, path: str) -> None:
        self._change()
        await super().make_directory(path)


async def test_a_new_bookie_is_formatted_and_found(bookies: Bookies, tmp_path: Path) -> None:
    bookie = await bookies.start(rack="r1", weight=2.0, properties={"zone": "z"})
    store = bookies.store()
    found = await available_bookies(store)
    assert found == {"b1": BookieRecord("b1", [bookie.address], bookie.nonce, True, "r1", 2.0, {"zone": "z"})}
    stored = Cookie.from_json((await store.read(cookie_key("b1"))).value)
    assert Cookie.from_json((tmp_path / "b1" / "cookie.json").read_bytes()) == stored
    await store.close()


async def test_the_same_bookie_starts_again_at_a_new_address_with_a_new_nonce(bookies: Bookies) -> None:
    first = await bookies.start(advertise=["b1.example:3181", "[::1]:0"])
    port = first.address.rpartition(":")[2]
    assert first.addresses == ["b1.example:3181", f"[::1]:{port}"]
    await first.close()
    second = await bookies.start(advertise=["elsewhere.example:3181"])
    assert second.nonce != first.nonce
    store = bookies.store()
    assert (await available_bookies(store))["b1"].addresses == ["elsewhere.example:3181"]
    await store.close()


async def test_an_emptied_directory_under_a_known_id_does_not_start(bookies: Bookies, tmp_path: Path) -> None:
    await (await bookies.start()).close()
    shutil.rmtree(tmp_path / "b1")
    with pytest.raises(CookieMismatchError, match="emptied or is not mounted"):
        await bookies.start()
    assert not (tmp_path / "b1").exists()


async def test_another_bookies_directory_does_not_start(bookies: Bookies) -> None:
    await (await bookies.start("b1")).close()
    with pytest.raises(CookieMismatchError, match="belongs to bookie b1"):
        await bookies.start("b2", folder="b1")


async def test_another_clusters_directory_does_not_start(bookies: Bookies) -> None:
    await (await bookies.start()).close()
    bookies.tree = MemoryTree()
    with pytest.raises(NoSuchClusterError):  # nor does it make a cluster there
        await bookies.start()
    await ensure_cluster(bookies.store(), draw_id=lambda: "another", now_ms=1)
    with pytest.raises(CookieMismatchError, match="of cluster"):
        await bookies.start()


async def test_a_decommissioned_bookies_directory_does_not_start(bookies: Bookies) -> None:
    await (await bookies.start()).close()
    store = bookies.store()
    await store.delete(cookie_key("b1"))
    await store.close()
    with pytest.raises(CookieMismatchError, match="decommissioned"):
        await bookies.start()


async def test_a_directory_with_other_data_does_not_start(bookies: Bookies, tmp_path: Path) -> None:
    (tmp_path / "b1").mkdir()
    (tmp_path / "b1" / "thesis.doc").write_text("precious")
    with pytest.raises(CookieMismatchError, match="holds data but no cookie"):
        await bookies.start()
    assert (tmp_path / "b1" / "thesis.doc").read_text() == "precious"


@pytest.mark.parametrize("bit", [0, 77, 8 * 40 + 5])
async def test_a_cookie_with_a_flipped_bit_is_written_again(
    bookies: Bookies, tmp_path: Path, bit: int
) -> None:
    await (await bookies.start()).close()
    path = tmp_path / "b1" / "cookie.json"
    right = path.read_bytes()
    flipped = bytearray(right)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    await (await bookies.start()).close()
    assert path.read_bytes() == right
    flipped[-2] ^= 1
    path.write_bytes(flipped)
    with pytest.raises((CorruptRecordError, CookieMismatchError)):
        await bookies.start()
    assert path.read_bytes() == flipped


async def test_a_damaged_cookie_does_not_start(bookies: Bookies, tmp_path: Path) -> None:
    await (await bookies.start()).close()
    (tmp_path / "b1" / "cookie.json").write_text("{")
    with pytest.raises(CorruptRecordError, match="cookie"):
        await bookies.start()


async def test_a_directory_that_is_open_does_not_start_twice(bookies: Bookies) -> None:
    await bookies.start("b1")
    with pytest.raises(DirectoryInUseError):
        await bookies.start("b1")


async def test_an_id_that_is_registered_does_not_start_twice(bookies: Bookies, tmp_path: Path) -> None:
    await (await bookies.start("b1")).close()
    shutil.copytree(tmp_path / "b1", tmp_path / "copy")
    await bookies.start("b1")
    with pytest.raises(KeyExistsError, match="running already"):
        await bookies.start("b1", folder="copy")
    # Nothing of the one that failed is left running: its directory can be opened.
    bookies.disk().lock_directory(str(tmp_path / "copy")).release()


@pytest.mark.parametrize("changes", range(8))
async def test_formatting_survives_a_crash_at_each_step(bookies: Bookies, changes: int) -> None:
    disk = CrashingDisk(changes)
    store = bookies.store()
    try:
        crashed = await Bookie.start(bookies.config(), store, disk, rng=bookies.rng, now_ms=lambda: 0)
    except CrashError:
        pass
    else:
        await crashed.close()
    store.crash()
    disk.close()
    bookie = await bookies.start()
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"a"])).status is Status.OK


@pytest.mark.parametrize("changes", range(1, 9))
async def test_what_a_formatting_made_before_it_was_killed_is_made_durable(
    bookies: Bookies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """All that a killed process has written is seen by the next one, and goes with a power cut."""
    synced, sync, names = set[str](), RealFile.sync, RealDisk.sync_directory

    async def noted(file: RealFile) -> None:
        await sync(file)
        synced.add(file._path)

    async def names_noted(disk: RealDisk, path: str) -> None:
        await names(disk, path)
        synced.add(path)

    monkeypatch.setattr(RealFile, "sync", noted)
    monkeypatch.setattr(RealDisk, "sync_directory", names_noted)
    directory = tmp_path / "new" / "deeper" / "b1"
    config = bookies.config(directories=(str(directory),))
    disk, store = CrashingDisk(changes), bookies.store()
    with suppress(CrashError):
        await (await Bookie.start(config, store, disk, rng=bookies.rng, now_ms=lambda: 0)).close()
    is_stored = await store.children(KEY_COOKIES) == ["b1"]
    store.crash()
    disk.close()
    wanted = {directory / "cookie.json.new", directory, *directory.parents[: len(directory.parents) - 2]}
    if not is_stored:
        synced.clear()  # Nothing tells how much of it the process before had synced.
        await bookies.start(directories=(str(directory),))
    assert {*map(str, wanted)} <= synced


async def test_the_registration_comes_back_after_the_session_expired(bookies: Bookies) -> None:
    store = bookies.store()
    bookie = await bookies.start(store=store)
    other = bookies.store()
    store.expire_session()
    async for _ in other.watch(available_key("b1")):
        if "b1" in (found := await available_bookies(other)):
            break
    assert found["b1"].nonce == bookie.nonce
    await other.close()


async def test_a_closed_bookie_is_no_longer_found_and_refuses_connections(bookies: Bookies) -> None:
    bookie = await bookies.start()
    client = await bookies.connect(bookie)
    await bookie.close()
    assert bookie.stopped.result() is None
    await client.gone()
    store = bookies.store()
    assert await available_bookies(store) == {}
    await store.close()
    with pytest.raises(ConnectionError):
        await bookies.connect(bookie)


async def test_closing_answers_what_was_accepted(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk)
    client = await bookies.connect(bookie)
    disk.hold()
    add = client.add(7, 0, [b"a"])
    await asyncio.wait_for(disk.arrived.wait(), 5)
    closing = asyncio.create_task(bookie.close())
    await asyncio.sleep(0)
    late = await client.add(7, 1, [b"b"])
    assert late.status is Status.SHUTTING_DOWN
    assert not add.done()
    disk.release()
    await closing
    assert (await add).status is Status.OK
    again = await bookies.connect(await bookies.start())
    assert (await again.add(7, 1, [b"b"])).status is Status.OK


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"listen": ("0.0.0.0", 0), "advertise": ["b:1"]}, "without authentication"),
        ({"listen": ("192.0.2.1", 0)}, "without authentication"),
        ({"listen": ("bookie.example", 0)}, "without authentication"),
        ({"listen": ("0.0.0.0", 0), "allow_remote_without_auth": True}, "what to advertise"),
        ({"listen": ("127.0.0.1", 70_000)}, "cannot listen"),
        ({"advertise": ["nowhere"]}, "is not host:port"),
        ({"weight": -1.0}, "weight"),
        ({"directories": ()}, "one data directory or several"),
        ({"directories": ("/d", "/d")}, "one data directory or several"),
        ({"bookie_id": "no spaces"}, "is not legal"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(values: dict[str, Any], says: str) -> None:
    complete: dict[str, Any] = {"bookie_id": "b1", "directories": ("/d",), **values}
    with pytest.raises(InvalidArgumentError, match=says):
        BookieConfig(**complete)


async def test_all_of_several_directories_are_needed_and_their_order_is_not(bookies: Bookies) -> None:
    paths = [str(bookies.folder / name) for name in ("one", "two", "three")]

    async def start(*directories: str) -> Bookie:
        return await bookies.start(directories=directories)

    bookie = await start(*paths)
    client = await bookies.connect(bookie)
    assert (await client.add(1, 0, [b"entry"])).status is Status.OK
    await bookie.close()
    bookie = await start(*reversed(paths))
    client = await bookies.connect(bookie)
    assert (await client.call(Read(1, NO_TERM, 0, 0, 0, 1, 1000))).entries == [(0, b"entry")]
    await bookie.close()
    with pytest.raises(CookieMismatchError, match="formatted with 3 data directories and is started with 2"):
        await start(*paths[:2])
    with pytest.raises(CookieMismatchError, match="holds no cookie"):
        await start(*paths[:2], str(bookies.folder / "empty"))
    other = await bookies.start("b2")
    await other.close()
    with pytest.raises(CookieMismatchError, match="belongs to bookie b2"):
        await start(*paths[:2], str(bookies.folder / "b2"))
    await (await start(*paths)).close()


async def test_what_is_announced_after_the_end_is_announced_to_nobody(bookies: Bookies) -> None:
    store = bookies.store()
    announcement = await BookieRegistration.make(store, BookieRecord("b1", ["127.0.0.1:3181"], "nonce"))
    await announcement.close()
    before = asyncio.all_tasks()
    announcement.announce(is_writable=False, order="")
    assert asyncio.all_tasks() == before, "no task tries for ever to change a record that is gone"


async def test_what_an_update_that_failed_may_have_announced_is_announced_anew(bookies: Bookies) -> None:
    """The bookie is writable again before it is tried again, and clients would go on without it for good."""
    store, other = bookies.store(), bookies.store()
    announcement = await BookieRegistration.make(store, BookieRecord("b1", ["127.0.0.1:3181"], "nonce"))
    update, has_failed = announcement._registration.update, asyncio.Event()

    async def update_and_be_cut(value: bytes) -> None:
        await update(value)
        if not has_failed.is_set():
            has_failed.set()
            raise MetadataUnavailableError("the test says that the answer was lost")

    announcement._registration.update = update_and_be_cut
    announcement.announce(is_writable=False, order="")
    await has_failed.wait()
    announcement.announce(is_writable=True, order="")
    async with asyncio.timeout(10), aclosing(other.watch(available_key("b1"))) as changes:
        async for _ in changes:
            if BookieRecord.from_json((await other.read(available_key("b1"))).value).is_writable:
                break
    await announcement.close()
    await store.close()
    await other.close()
