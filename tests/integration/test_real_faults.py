"""Bookies whose system calls fail, or that die at one: the kernel's own answers, forged by strace.

What was acknowledged is there afterwards, identical and without a gap, and nothing else is served: the checks
are those of the crash runs (`benchmarks.crash_recovery`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import resource
from typing import TYPE_CHECKING

import pytest

import client_aio
from benchmarks.crash_recovery import Run, check, recover
from benchmarks.crash_writer import Writer, payload
from bookie_aio.wire.messages import Stop
from tests.support.cluster import BookieProcess, Cluster
from tests.support.realfaults import WAIT_S, exit_code_of, registered, replaced
from tests.support.replicas import stop_of, stored
from tests.support.strace import injecting, starting_under

if TYPE_CHECKING:
    from pathlib import Path

IN_FLIGHT = 200
ENTRIES = 2000
FAILURE = 1
KILLED = -9


def one_small_bookie(directory: Path) -> Cluster:
    """Return a cluster of a single bookie, whose word counts alone, and whose segments are soon full."""
    cluster = Cluster(directory, bookies=1)
    cluster["b1"].module = "tests.support.smallstorage"
    return cluster


async def write_until_it_fails(cluster: Cluster, seed: int) -> Run:
    """Write to a ledger on one bookie until that is gone."""
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1)
        writer = Writer(ledger, seed, IN_FLIGHT)
        await asyncio.wait_for(writer.run(), WAIT_S)
        await ledger.abort()
    assert writer.out_of_order == 0
    return Run(seed, ledger.ledger_id, writer.issued, writer.acknowledged + 1)


def failed_write(bookie: BookieProcess) -> tuple[str, int, str]:
    """Return the segment whose write is said to have failed, where the write began, and the reason."""
    assert bookie.child is not None
    message = bookie.child.log_tail().splitlines()[-1]
    found = re.fullmatch(r"bookie-aio: writing (\S+\.segment) at (\d+): (.*)", message)
    assert found, message
    return found[1], int(found[2]), found[3]


def lose(path: str, offset: int) -> None:
    """Zero a file from there on: as if nothing that was not synced had got to the disk."""
    with open(path, "r+b") as file:
        size = file.seek(0, 2)
        file.seek(offset)
        file.write(bytes(size - offset))


def bytes_at(path: str, offset: int, size: int) -> bytes:
    """Return bytes of a file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (("fdatasync:error=EIO:when=20",), "Input/output error"),
        (("pwritev2:error=EIO:when=30+",), "Input/output error"),
        (("pwritev2:error=ENOSPC:when=30+",), "No space left on device"),
        (("pwritev2:retval=0:when=30+", "pwrite64:retval=0:when=2+"), "a write made no progress"),
    ],
    ids=[
        "sync fails",
        "write fails",
        "write finds no space",
        "write gets stuck",
    ],
)
async def test_a_journal_that_fails_ends_the_bookie(
    faults: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    """It acknowledges nothing of that group and nothing after it, says why, and is well when it is back."""
    failing = faults[-1].partition(":")[0]
    async with one_small_bookie(tmp_path) as cluster:
        bookie = cluster["b1"]
        async with injecting(bookie, *faults, watched="fdatasync") as calls:
            run = await write_until_it_fails(cluster, 1)
            assert await exit_code_of(bookie) == FAILURE
        path, offset, said = failed_write(bookie)
        assert said == reason
        later = calls.behind_first_fault(failing)
        assert not [line for line in later if path in line and "fdatasync(" in line]  # it is not tried again
        lose(path, offset)
        await bookie.start()
        await recover(cluster.uri, run, 1)
        await check(cluster.uri, run)


async def test_a_write_that_the_system_cuts_short_ends_the_bookie(tmp_path: Path) -> None:
    """The limit on the size of files cuts a group in two, at an odd byte: part of it is on the disk."""
    async with one_small_bookie(tmp_path) as cluster:
        bookie = cluster["b1"]
        limit = 1_000_001
        resource.prlimit(bookie.pid, resource.RLIMIT_FSIZE, (limit, limit))
        run = await write_until_it_fails(cluster, 2)
        assert await exit_code_of(bookie) == FAILURE
        path, offset, said = failed_write(bookie)
        assert said == "File too large"
        assert bytes_at(path, offset, 4) == b"BKG1"  # the part that was written
        assert offset < limit
        await bookie.start()
        await recover(cluster.uri, run, 1)
        await check(cluster.uri, run)


async def test_a_write_that_is_short_is_continued(tmp_path: Path) -> None:
    async with one_small_bookie(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with injecting(cluster["b1"], "pwritev2:retval=0:when=2+2", watched="pwrite64") as calls:
            ledger = await client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1)
            writer = Writer(ledger, 3, IN_FLIGHT)
            await asyncio.wait_for(writer.run(5000), WAIT_S)
            await ledger.close()
        assert writer.failure is None
        assert [line for line in calls.lines() if "pwrite64(" in line]
        await cluster["b1"].kill()
        await cluster["b1"].start()
        await check(cluster.uri, Run(3, ledger.ledger_id, 5000, 5000, kept=5000))


async def test_a_writer_goes_on_when_the_disk_of_a_bookie_fails(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        victim = cluster[ledger.metadata.last_fragment.bookies[1]]
        async with injecting(victim, "fdatasync:error=EIO:when=7"):
            writer = Writer(ledger, 4, IN_FLIGHT)
            writing = asyncio.create_task(writer.run())
            assert await exit_code_of(victim) == FAILURE
        await replaced(ledger, writer, victim.bookie_id)
        await victim.start()
        run = Run(4, ledger.ledger_id, 0, 0)
        await recover(cluster.uri, run, 1)  # which fences the writer
        await asyncio.wait_for(writing, WAIT_S)
        run.issued, run.acknowledged = writer.issued, writer.acknowledged + 1
        await check(cluster.uri, run)


async def test_a_bookie_that_cannot_reserve_space_is_read_only_until_it_can(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, bookies=4)
    for bookie in cluster.bookies.values():
        bookie.module = "tests.support.smallstorage"
    async with cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        victim = ledger.metadata.last_fragment.bookies[1]
        async with injecting(cluster[victim], "fallocate:error=ENOSPC"):
            writer = Writer(ledger, 5, IN_FLIGHT)
            writing = asyncio.create_task(writer.run())
            await registered(client, victim, writable=False)
            await replaced(ledger, writer, victim)
            assert await stop_of(client, victim, ledger.ledger_id, 0) is Stop.END
            run = Run(5, ledger.ledger_id, 0, 0)
            await recover(cluster.uri, run, 1)
            await asyncio.wait_for(writing, WAIT_S)
            run.issued, run.acknowledged = writer.issued, writer.acknowledged + 1
            await check(cluster.uri, run)
        await registered(client, victim, writable=True)
        async with client.create_ledger(ensemble_size=4, write_quorum=4, ack_quorum=4) as another:
            await another.add_entry(b"it takes entries again")


# Spread over what a bookie does while it writes: groups, new segments, seals, checkpoints, spare files.
DEADLY = [
    ("fdatasync", 6), ("pwritev2", 13), ("rename", 1), ("rename", 4), ("fsync", 1), ("fsync", 7),
    ("fallocate", 2), ("ftruncate,unlink", 1),
]  # fmt: skip


async def test_a_bookie_that_is_killed_at_a_call_loses_nothing(tmp_path: Path) -> None:
    """One directory through all of it: each start replays what the death before it left."""
    runs: list[Run] = []
    async with one_small_bookie(tmp_path) as cluster:
        bookie = cluster["b1"]
        for seed, (call, nth) in enumerate(DEADLY):
            async with injecting(bookie, f"{call}:signal=SIGKILL:when={nth}"):
                runs.append(await write_until_it_fails(cluster, seed))
                assert await exit_code_of(bookie) == KILLED, f"not at {call} {nth}"
            await bookie.start()
            await recover(cluster.uri, runs[-1], 1)
            for run in runs[-2:]:
                await check(cluster.uri, run)
        for run in runs:
            await check(cluster.uri, run)


async def test_a_start_that_is_killed_at_a_call_loses_nothing(tmp_path: Path) -> None:
    async with one_small_bookie(tmp_path) as cluster:
        bookie = cluster["b1"]
        async with injecting(bookie, "fdatasync:signal=SIGKILL:when=15"):
            run = await write_until_it_fails(cluster, 1)
            assert await exit_code_of(bookie) == KILLED
        for call, nth in [("pwritev2", 1), ("fsync", 3), ("rename", 1), ("fdatasync", 1)]:
            bookie.prefix = starting_under(bookie, f"{call}:signal=SIGKILL:when={nth}")
            with contextlib.suppress(RuntimeError):  # it may serve for a moment
                await bookie.start()
            assert await exit_code_of(bookie) == KILLED, f"not at {call} {nth}"
        bookie.prefix = []
        await bookie.start()
        await recover(cluster.uri, run, 1)
        await check(cluster.uri, run)


async def test_a_start_that_cannot_read_ends_and_concludes_nothing(tmp_path: Path) -> None:
    """Not that a group is torn, which may be the last one acknowledged, nor that anything is lost."""
    async with one_small_bookie(tmp_path) as cluster:
        bookie = cluster["b1"]
        async with injecting(bookie, "fdatasync:signal=SIGKILL:when=15"):
            run = await write_until_it_fails(cluster, 1)
            assert await exit_code_of(bookie) == KILLED
        for read in (1, 2, 4):  # the checkpoint, headers of segments, groups; all by one thread
            bookie.prefix = starting_under(bookie, "preadv2:error=EAGAIN", f"pread64:error=EIO:when={read}+")
            with pytest.raises(RuntimeError):
                await bookie.start()
            assert await exit_code_of(bookie) == FAILURE, f"not from read {read} on"
            assert bookie.child is not None
            message = bookie.child.log_tail().splitlines()[-1]
            assert "Input/output error. Nothing is concluded from what cannot be read" in message
        bookie.prefix = []
        await bookie.start()
        await recover(cluster.uri, run, 1)
        await check(cluster.uri, run)


@pytest.mark.parametrize("is_sealed", [False, True], ids=["unsealed", "sealed"])
async def test_a_read_that_fails_is_never_no_such_entry(is_sealed: bool, tmp_path: Path) -> None:
    """Where an unsealed segment has an entry is known in memory; an index cannot be read either."""
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(ack_quorum=3) as ledger:
            await Writer(ledger, 6, IN_FLIGHT).run(ENTRIES)
        ledger_id, run = ledger.ledger_id, Run(6, ledger.ledger_id, ENTRIES, ENTRIES, kept=ENTRIES)
        victim = cluster[ledger.metadata.last_fragment.bookies[0]]
        if is_sealed:
            await victim.end()
            await victim.start()
            await client._context.pool.directory.refresh()
        async with injecting(victim, "preadv2,pread64:error=EIO") as calls:
            for entry_id in (0, ENTRIES // 2, ENTRIES - 1):
                assert await stop_of(client, victim.bookie_id, ledger_id, entry_id) is Stop.UNKNOWN
            behind = await stop_of(client, victim.bookie_id, ledger_id, ENTRIES)
            assert behind is (Stop.UNKNOWN if is_sealed else Stop.NO_SUCH_ENTRY)
            await check(cluster.uri, run)
            assert [line for line in calls.lines() if "(INJECTED)" in line]
        # What can be read again is given again.
        found = await stored(client, victim.bookie_id, ledger_id, range(ENTRIES))
        assert {entry_id: one.payload for entry_id, one in found.items()} == {
            entry_id: payload(6, entry_id) for entry_id in range(ENTRIES)
        }
        await check(cluster.uri, run)


def flip_at_random(path: Path, flips: int, rng: random.Random) -> None:
    """Turn so many bits of a file, wherever they are."""
    data = bytearray(path.read_bytes())
    for _ in range(flips):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    with path.open("r+b") as file:
        file.write(data)


async def test_bits_that_flip_under_a_running_bookie_are_never_served(tmp_path: Path) -> None:
    """In its sealed segments and their indexes: it gives what was written, or says that it does not know."""
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(ack_quorum=3) as ledger:
            await Writer(ledger, 7, IN_FLIGHT).run(ENTRIES)
        victim = cluster[ledger.metadata.last_fragment.bookies[0]]
        await victim.end()
        await victim.start()
        await client._context.pool.directory.refresh()
        rng = random.Random(7)
        (segment,) = (
            path for path in victim.directory.glob("*.segment") if path.with_suffix(".index").exists()
        )
        for path in (segment, segment.with_suffix(".index")):  # which is rebuilt, from a damaged segment
            flip_at_random(path, 30, rng)
            found = await stored(client, victim.bookie_id, ledger.ledger_id, range(ENTRIES))
            assert found
            for entry_id in range(ENTRIES):
                if entry_id in found:
                    assert found[entry_id].payload == payload(7, entry_id)
                else:
                    assert await stop_of(client, victim.bookie_id, ledger.ledger_id, entry_id) is Stop.UNKNOWN
            await check(cluster.uri, Run(7, ledger.ledger_id, ENTRIES, ENTRIES, kept=ENTRIES))
