"""`metadata dump` and `restore`, as an operator moves a cluster's metadata, and puts an older dump back."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from typing import TYPE_CHECKING, Any

import client_aio
from metadata.access.bookies import SetBacks
from metadata.access.dump import RestoreMark
from metadata.access.ledgers import LEDGER_SEQUENCE
from metadata.backends.uri import open_store
from metadata.ids import KEY_RESTORE
from tests.support.cli import TIMEOUT_S, Cli
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path


async def command(cli: Cli, *arguments: str, code: int = 0, stdin: bytes = b"") -> tuple[bytes, bytes]:
    """Run a command, expect its exit code, and return its output and its errors."""
    process = cli.start(*arguments)
    out, error = await asyncio.to_thread(process.communicate, stdin, TIMEOUT_S)
    assert process.returncode == code, (process.returncode, out, error)
    return out, error


async def written(client: client_aio.Client, text: bytes) -> int:
    """Write one entry, and close its ledger."""
    async with client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1) as writer:
        await writer.add_entry(text)
    return writer.ledger_id


async def test_an_older_dump_is_restored_elsewhere_and_no_id_is_given_out_twice(tmp_path: Path) -> None:
    file = tmp_path / "dump.jsonl"
    (tmp_path / "new").mkdir()
    new_uri = f"sqlite://{tmp_path / 'new' / 'metadata.db'}"
    async with Cluster(tmp_path, bookies=1) as cluster:
        cli = Cli(cluster.uri)
        async with client_aio.connect(cluster.uri) as client:
            kept = await written(client, b"kept")
        # Beside running bookies.
        out, _ = await command(cli, "metadata", "dump", str(file), "-o", "json")
        assert (json.loads(out)["ledgers"], stat.S_IMODE(file.stat().st_mode)) == (1, 0o600)
        async with client_aio.connect(cluster.uri) as client:
            forgotten = await written(client, b"written after the dump")
            drawn = await client._context.ledgers.store.ids_drawn(LEDGER_SEQUENCE)

    elsewhere = Cli(new_uri)
    cut = file.read_bytes()[:-40]
    _, error = await command(elsewhere, "metadata", "restore", "-", stdin=cut, code=5)
    assert b"was cut off" in error
    assert not (tmp_path / "new" / "metadata.db").exists()
    out, _ = await command(elsewhere, "metadata", "restore", "-", "-o", "json", stdin=file.read_bytes())
    report: dict[str, Any] = json.loads(out)
    assert (report["ledgers"], report["counter"]) == (1, drawn - 32)

    restored = Cluster(tmp_path, bookies=1, uri=new_uri)
    async with restored, client_aio.connect(new_uri) as client:
        async with client.open_ledger(kept) as reader:
            assert [entry.data async for entry in reader.read(0, 0)] == [b"kept"]
        assert await written(client, b"new") >= drawn
        (event,) = (await SetBacks.read(client._context.ledgers.store)).events
        assert (event.counter, event.answered) == (drawn - 32, [])
        assert forgotten < event.raised_to, "so its entries stay until an operator says otherwise"


async def test_a_dump_is_read_from_a_pipe_by_its_name_and_written_over_no_device(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    cli = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    await command(cli, "bookie", "format", "--new-cluster", "--dir", str(tmp_path / "b"))
    os.mkfifo(fifo := tmp_path / "fifo")
    for target in (fifo, tmp_path, tmp_path / "nowhere" / "dump"):
        _, error = await command(cli, "metadata", "dump", str(target), code=2)
        assert str(target).encode() in error
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    (tmp_path / "latest").symlink_to(tmp_path / "dump")
    await command(cli, "metadata", "dump", str(tmp_path / "latest"))
    dumped = (tmp_path / "dump").read_bytes()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".new")]

    elsewhere = Cli(f"sqlite://{tmp_path / 'new' / 'metadata.db'}")
    for source in (tmp_path, tmp_path / "nowhere"):
        _, error = await command(elsewhere, "metadata", "restore", str(source), code=2)
        assert str(source).encode() in error
    restoring = asyncio.create_task(command(elsewhere, "metadata", "restore", str(fifo), "-o", "json"))
    await asyncio.to_thread(fifo.write_bytes, dumped)
    assert json.loads((await restoring)[0])["dry_run"] is False
    # Standard input is no terminal that a question could be answered at, so it has to be answered before.
    clear = ("metadata", "restore", "-", "--clear")
    _, error = await command(elsewhere, *clear, stdin=dumped, code=2)
    assert b"say --yes as well" in error
    assert await command(elsewhere, "ledger", "list", code=0)
    await command(elsewhere, *clear, "--yes", stdin=dumped)


async def test_a_dry_run_refuses_what_the_restore_would_refuse(tmp_path: Path) -> None:
    for name in ("first", "second"):
        cli = Cli(f"sqlite://{tmp_path / name}.db")
        await command(cli, "bookie", "format", "--new-cluster", "--dir", str(tmp_path / name))
        await command(cli, "metadata", "dump", str(tmp_path / f"{name}.jsonl"))
    check = ("metadata", "restore", str(tmp_path / "second.jsonl"), "--dry-run")

    nowhere = Cli(f"sqlite://{tmp_path / 'nowhere' / 'metadata.db'}")
    for arguments in (check, check[:-1]):
        _, error = await command(nowhere, *arguments, code=2)
        assert f"the directory {tmp_path / 'nowhere'} does not exist".encode() in error

    # A restore of another dump was interrupted in this store, which holds no cluster yet.
    half = Cli(f"sqlite://{tmp_path / 'half.db'}")
    assert half.metadata is not None
    async with await open_store(half.metadata, create=True) as store:
        await store.create(KEY_RESTORE, RestoreMark("another", "writing").to_json())
    for arguments in (check, (*check, "--clear"), check[:-1]):
        _, error = await command(half, *arguments, code=1)
        assert b"a restore of another dump was interrupted" in error
    empty = Cli(f"sqlite://{tmp_path / 'empty.db'}")
    await command(empty, *check)
    assert not (tmp_path / "empty.db").exists()


async def test_a_dump_takes_the_place_of_no_file_of_its_store(tmp_path: Path) -> None:
    home, links = tmp_path / "home", tmp_path / "links"
    home.mkdir()
    links.mkdir()
    (links / "linked.db").symlink_to(home / "metadata.db")
    (links / "elsewhere").symlink_to(home)
    cli = Cli(f"sqlite://{home / 'metadata.db'}")
    await command(cli, "bookie", "format", "--new-cluster", "--dir", str(home / "b"))
    (leases,) = home.glob("metadata.db-leases-*")
    names = ("metadata.db", "metadata.db-wal", "metadata.db-shm", "metadata.db-journal", leases.name)
    targets = [*(home / name for name in names), *(links / "elsewhere" / name for name in names)]
    targets += [links / "linked.db", links / "linked.db-leases-x"]
    before = (home / "metadata.db").read_bytes()
    for metadata in (cli.metadata, f"sqlite://{links / 'linked.db'}"):
        for target in targets:
            if target.name.startswith("linked.db-") and metadata == cli.metadata:
                continue
            _, error = await command(Cli(metadata), "metadata", "dump", str(target), code=2)
            (line,) = error.decode().splitlines()
            assert f"{target} is a file of the metadata store itself" in line
    assert (home / "metadata.db").read_bytes() == before
    for name in ("metadata.db.dump", "metadata.db-dump", "metadata.db-wal2", "other.db-wal"):
        await command(cli, "metadata", "dump", str(home / name))
