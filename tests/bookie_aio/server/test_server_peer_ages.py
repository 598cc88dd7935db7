"""What a bookie saw of the ages of others: the evidence for a directory and metadata set back together."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie_aio.server import age
from bookie_aio.storage.segment.format import AGE
from bookie_aio.wire.messages import Status
from metadata.access.bookies import SetBacks
from metadata.ids import cookie_key
from tests.bookie_aio.server.test_server_age import age_of, copy_of, draw, fresh, poll

if TYPE_CHECKING:
    from pathlib import Path

    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies

__all__ = ["fresh"]


async def start(bookies: Bookies, bookie_id: str) -> Bookie:
    return await bookies.start(bookie_id, sweep_interval_s=3600.0, age_interval_s=3600.0)


def seen_by(folder: Path, of: str) -> int:
    """Return the age of a bookie that the file of another one has."""
    return {peer.bookie_id: peer.number for peer in age_of(folder).peers}.get(of, 0)


async def write(bookies: Bookies, bookie: Bookie) -> None:
    """Have a bookie write something, which makes its next raise due."""
    client = await bookies.connect(bookie)
    (ledger_id,) = await draw(bookies, 1)
    assert (await client.add(ledger_id, 0, [b"0"])).status is Status.OK


async def test_a_bookie_looks_at_the_others_whenever_it_has_raised_its_age(
    fresh: Bookies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(age, "_TICKS_PER_IDLE_LOOK", 1 << 30)
    first = await start(fresh, "b1")
    other = await fresh.start("b2", sweep_interval_s=3600.0, age_interval_s=0.01)
    await poll(lambda: seen_by(tmp_path / "b2", "b1") == first.age.number)
    await first.age.raise_if_written(is_forced=True)
    await write(fresh, other)
    await poll(lambda: seen_by(tmp_path / "b2", "b1") == first.age.number)


async def test_a_bookie_that_ends_looks_at_the_others_once_more(fresh: Bookies, tmp_path: Path) -> None:
    first, other = await start(fresh, "b1"), await start(fresh, "b2")
    await first.age.raise_if_written(is_forced=True)
    await write(fresh, other)
    await other.close()
    assert seen_by(tmp_path / "b2", "b1") == first.age.number


async def set_back_together(bookies: Bookies, folder: Path) -> None:
    """Set b1 and the metadata back together. Bookie b2 wrote nothing since then, and saw b1's next life."""
    bookie, other = await start(bookies, "b1"), await start(bookies, "b2")
    await other.age.learn_peers()
    await write(bookies, bookie)
    await bookie.close()
    shutil.copytree(folder / "b1", folder / "backup")
    older = copy_of(bookies.tree)
    bookie = await start(bookies, "b1")
    await write(bookies, bookie)
    await bookie.age.raise_if_written()
    await other.age.learn_peers()
    await other.close()
    await bookie.close()
    bookies.tree = older
    shutil.rmtree(folder / "b1")
    shutil.copytree(folder / "backup", folder / "b1")


@pytest.mark.parametrize("order", [("b1", "b2"), ("b2", "b1")])
async def test_a_bookie_that_wrote_nothing_knows_that_another_one_and_the_metadata_were_set_back(
    fresh: Bookies, tmp_path: Path, order: tuple[str, str]
) -> None:
    await set_back_together(fresh, tmp_path)
    bookies = {name: await start(fresh, name) for name in order}
    await bookies["b1"].age.learn_events()
    assert bookies["b1"].age.has_lost
    assert not bookies["b2"].age.has_lost
    for name in order:
        await bookies[name].close()
        assert not (await start(fresh, name)).age.has_lost
    assert len((await SetBacks.read(fresh.store())).events) == 1


async def test_a_store_that_is_set_back_under_a_bookie_has_older_ages_of_others(
    fresh: Bookies, tmp_path: Path
) -> None:
    store = fresh.store()
    other = await fresh.start("b2", store=store, sweep_interval_s=3600.0, age_interval_s=3600.0)
    bookie = await start(fresh, "b1")
    older = copy_of(fresh.tree)
    await bookie.age.raise_if_written(is_forced=True)
    await other.age.learn_peers()
    number = bookie.age.number
    await bookie.close()
    store.tree = fresh.tree = older
    for _ in range(3):  # told once, and seen again and again
        await other.age.learn_peers()
        (event,) = (await SetBacks.read(store)).events
        assert event.ages["b1"][1] == number
        assert other.age.in_doubt_below == event.raised_to


async def test_a_new_bookie_under_the_id_of_one_that_was_removed_proves_nothing(
    fresh: Bookies, tmp_path: Path
) -> None:
    other, bookie = await start(fresh, "b2"), await start(fresh, "b1")
    for _ in range(2):
        await bookie.age.raise_if_written(is_forced=True)
    await other.age.learn_peers()
    await bookie.close()
    await fresh.store().delete(cookie_key("b1"))
    new = await fresh.start("b1", folder="another", sweep_interval_s=3600.0, age_interval_s=3600.0)
    assert new.age.number < seen_by(tmp_path / "b2", "b1")
    await other.age.learn_peers()
    assert new.age.number == seen_by(tmp_path / "b2", "b1")
    await other.close()
    assert not (await start(fresh, "b2")).age.in_doubt_below


# --- the file of another bookie ---


@pytest.mark.parametrize("later", [False, True])
async def test_an_age_file_of_another_bookie_is_a_damaged_one(
    fresh: Bookies, tmp_path: Path, later: bool
) -> None:
    for name in ("b1", "b2"):
        bookie = await start(fresh, name)
        await write(fresh, bookie)
        for _ in range(5 if (name == "b2") == later else 1):
            await bookie.age.raise_if_written(is_forced=True)
        await bookie.close()
    assert (age_of(tmp_path / "b2").number > age_of(tmp_path / "b1").number) == later
    shutil.copy(tmp_path / "b2" / AGE, tmp_path / "b1" / AGE)
    bookie = await start(fresh, "b1")
    assert bookie.age.has_lost
    assert not bookie.age.in_doubt_below
    assert not (await SetBacks.read(fresh.store())).events
    assert age_of(tmp_path / "b1").owner not in (0, age_of(tmp_path / "b2").owner)


async def test_the_age_file_of_an_older_release_is_the_bookies_own(fresh: Bookies, tmp_path: Path) -> None:
    await (await start(fresh, "b1")).close()
    whole = age_of(tmp_path / "b1")
    (tmp_path / "b1" / AGE).write_bytes(replace(whole, owner=0).to_bytes())
    bookie = await start(fresh, "b1")
    assert not bookie.age.has_lost
    assert age_of(tmp_path / "b1").owner == whole.owner
