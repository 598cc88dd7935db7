"""`--dry-run` of every command that has it: the metadata store and the directories stay as they are."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import client_aio
from benchmarks import every_command
from metadata.access.bookies import SetBack, SetBacks
from metadata.access.dump import dump
from metadata.access.ledgers import LEDGER_SEQUENCE
from metadata.backends.uri import open_store
from metadata.errors import NoSuchKeyError
from metadata.ids import KEY_AVAILABLE
from tests.bookie_aio.server.conftest import Bookies
from tests.support.cli import TIMEOUT_S, Cli

if TYPE_CHECKING:
    from pathlib import Path

    from metadata.store import MetadataStore, Versioned

DRY_RUNS: dict[str, list[str]] = {
    "bookie accept-metadata": [],
    "bookie read-only": ["on", "b1"],
    "bookie decommission": ["b4"],
    "bookie replace": ["b4", "b1"],
    "bookie forget": ["b5"],
    "cluster repair": [],
    "metadata restore": ["DUMP", "--clear", "--metadata", "OTHER"],
}


async def everything(store: MetadataStore, key: str = "") -> dict[str, Versioned | int]:
    """Return all keys of a store with values and versions, and its id counter. Registrations are left out."""
    found: dict[str, Versioned | int] = {}
    if not key:
        found[LEDGER_SEQUENCE] = await store.ids_drawn(LEDGER_SEQUENCE)
    for name in await store.children(key):
        child = f"{key}/{name}".lstrip("/")
        if child != KEY_AVAILABLE:  # A bookie announces its free space there.
            with suppress(NoSuchKeyError):
                found[child] = await store.read(child)
            found |= await everything(store, child)
    return found


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return sizes and times of all files of the bookies."""
    paths = [path for bookie in folder.glob("b?") for path in bookie.rglob("*")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def test_every_dry_run_is_tried() -> None:
    assert DRY_RUNS.keys() == {
        name
        for name, command in every_command.commands().items()
        if any("--dry-run" in parameter.opts for parameter in command.params)
    }


async def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    uri, other_uri = (f"sqlite://{tmp_path / name}" for name in ("metadata.db", "other.db"))
    bookies = Bookies(tmp_path)
    quiet: dict[str, Any] = {"age_interval_s": 3600.0, "sweep_interval_s": 3600.0}
    async with await open_store(uri, create=True) as store, await open_store(other_uri, create=True) as other:
        await SetBacks().replace(store, [SetBack("event", "b9", 0, 10, [])])
        running = {
            name: await bookies.start(name, store=await open_store(uri, create=True), **quiet)
            for name in ("b1", "b2", "b3", "b4", "b5")
        }
        await running["b5"].close()  # Nothing names it.
        async with client_aio.connect(uri) as client:
            for _ in range(4):
                async with client.create_ledger() as writer:
                    await writer.add_entries([b"entry"] * 10)
        await running["b4"].close()
        (tmp_path / "dump").write_bytes(b"".join([line async for line in dump(store, now_ms=0)]))
        await other.create("logs/older", b"{}")
        await other.create("cluster", b'{"format": 1, "instance_id": "i", "created_ms": 0}')

        before = [await everything(store), await everything(other), files(tmp_path)]
        cli, places = Cli(uri), {"DUMP": str(tmp_path / "dump"), "OTHER": other_uri}
        for command, arguments in DRY_RUNS.items():
            words = [places.get(word, word) for word in arguments]
            process = cli.start(*command.split(), *words, "--dry-run", "-o", "json")
            out, error = await asyncio.to_thread(process.communicate, b"", TIMEOUT_S)
            assert process.returncode == 0, (command, out, error)
            after = [await everything(store), await everything(other), files(tmp_path)]
            assert after == before, command
        await bookies.close()
