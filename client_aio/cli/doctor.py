"""`bookie-aio doctor`: what is wrong, or soon will be, with its evidence and what to do.

Looks at the cluster as `cluster status` does, asks each bookie for its figures, and measures the metadata
store and the clocks. With `--dir` it looks at directories of this machine as well.

The checks at the end of `CHECKS` judge an `Observed`, and touch nothing.
"""

import asyncio
import email.utils
import errno
import http.client
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bookie_aio.config import CONNECTIONS_MAX, MIB
from client_aio.autorecovery.survey import ClusterSurvey, all_metadata, figures_of, survey
from client_aio.cli.exit_codes import Exit
from client_aio.cli.options import Invocation, command, usage_error
from metadata.access.bookies import split_address
from metadata.access.ledgers import LEDGER_SEQUENCE
from metadata.errors import BookKeeperError, MetadataCorruptError
from metadata.ids import KEY_CLUSTER, LEDGER_ID_MAX, MALFORMED
from metadata.model.ledger import LedgerState
from metadata.text import escape

if TYPE_CHECKING:
    from client_aio.context import ClientContext

app = typer.Typer()

FSYNC_P99_US_MAX = 100_000
GROUPS_MIN = 100
"""Fewer group commits say nothing of the disk's slowest hundredth."""
CLOCK_SKEW_S_MAX = 2.0
"""HTTP tells the time in whole seconds."""
METADATA_S_MAX = 0.1
CONNECTIONS_SHARE_MAX = 0.8
DESCRIPTORS_MIN = 4096
IDS_SHARE_MAX = 0.5
_METADATA_READS = 9
_INFO_TIMEOUT_S = 5.0
_HTTP_TIMEOUT_S = 2.0
_PROBE_BYTES = 4 * MIB
_PROBE_SYNCS = 20
_FALLOCATE_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_TO_MAKE_ROOM = "free space: a bookie takes no entries without"
_TO_MAY_WRITE = "run `doctor` as the bookie's user, or let that user write here"
_TO_DO = {
    errno.ENOSPC: _TO_MAKE_ROOM,
    errno.EDQUOT: _TO_MAKE_ROOM,
    errno.EROFS: "the system's log says why it is read-only: mend that, and mount it writable",
    errno.EIO: "replace the disk (docs/OPERATING.md)",
    errno.EACCES: _TO_MAY_WRITE,
    errno.EPERM: _TO_MAY_WRITE,
}
"""What to do about a directory that cannot be written to, by the number of the error."""


class Finding(NamedTuple):
    """One thing that is wrong: where, how that is known, and what to do."""

    check: str
    subject: str
    evidence: str
    action: str


class DirectoryLook(NamedTuple):
    """A directory of this machine, as a bookie's storage would meet it."""

    path: str
    free_bytes: int
    total_bytes: int
    fsync_s: list[float]
    tells_data: bool
    """Whether SEEK_DATA tells what was written from what was not."""
    reserves: bool
    """Whether space is reserved without being written (fallocate)."""


class FailedLook(NamedTuple):
    """A directory of this machine that refused what a bookie's storage does there."""

    path: str
    error: str
    number: int | None = None
    """The system's number of the error."""


@dataclass
class Observed:
    """The state of a cluster and of this machine, as far as it could be seen."""

    cluster: ClusterSurvey | None = None
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What INFO answers, by bookie."""
    versions: dict[str, str] = field(default_factory=dict)
    """The release of each bookie that announces it."""
    hosts: dict[str, str] = field(default_factory=dict)
    """The host of each running bookie's first address."""
    clocks: dict[str, float] = field(default_factory=dict)
    """By how many seconds a bookie's clock is ahead of this machine's."""
    metadata_s: list[float] = field(default_factory=list)
    """The times of reads of the metadata store."""
    stuck: list[int] = field(default_factory=list)
    """Ledgers that were IN_RECOVERY, with the same metadata, at the begin and at the end."""
    watched_s: float = 0.0
    """The time from that begin to that end."""
    ids_drawn: int = 0
    id_floor: int = 0
    directories: list[DirectoryLook] = field(default_factory=list)
    failed_directories: list[FailedLook] = field(default_factory=list)
    descriptors: int | None = None
    """The hard limit of this process; None where it was not looked at."""
    unseen: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""


# --- the checks ---------------------------------------------------------------------------------------

Found = Iterator[tuple[str, str, str]]  # subject, evidence, action


def _cluster(seen: Observed) -> Found:
    for problem in seen.cluster.problems if seen.cluster is not None else ():
        yield (
            "cluster",
            problem.text,
            "`bookie-aio cluster status` shows more; docs/OPERATING.md has each task",
        )


def _fsync(seen: Observed) -> Found:
    for name, figures in seen.figures.items():
        p99, groups = figures["storage"]["fsync_us"]["p99"], figures["storage"]["groups"]["count"]
        if groups >= GROUPS_MIN and p99 > FSYNC_P99_US_MAX:
            evidence = f"p99 of a commit is {p99 / 1000:,.0f} ms over {groups:,} groups since the start"
            yield name, evidence, "every add waits for it: look at the disk, and at others that use it"
    for one in seen.directories:
        slowest = max(one.fsync_s)
        if slowest * 1e6 > FSYNC_P99_US_MAX:
            evidence = f"the slowest of {len(one.fsync_s)} fsyncs took {slowest * 1000:,.0f} ms"
            yield one.path, evidence, "every add waits for it: look at the disk, and at others that use it"


def _disk(seen: Observed) -> Found:
    for name, figures in seen.figures.items():
        disk = figures["storage"]["disk"]
        share = f"{disk['free_bytes'] / 2**30:,.1f} of {disk['total_bytes'] / 2**30:,.1f} GiB free"
        if disk["is_full"] or disk["is_low"]:
            yield (
                name,
                f"{share}: it takes no entries",
                "truncate logs, delete ledgers, or start another bookie",
            )
        elif disk["is_tight"]:
            yield (
                name,
                f"{share}: it will be read-only",
                "truncate logs, delete ledgers, or start another bookie",
            )


def _damage(seen: Observed) -> Found:
    for name, figures in seen.figures.items():
        stored = figures["storage"]
        unread = stored["unread_blocks"] + stored["scrubbed"]["unread"]
        damaged = stored["damaged_blocks"] + stored["scrubbed"]["damaged"]
        if unread:
            yield name, f"the disk did not return {unread:,} blocks", "replace the disk (docs/OPERATING.md)"
        if damaged:
            action = "run `bookie-aio cluster repair`, and watch the disk"
            yield name, f"{damaged:,} blocks had a wrong checksum since the start", action


def _descriptors(seen: Observed) -> Found:
    for name, figures in seen.figures.items():
        used, most = figures["connections"], figures["connections_max"]
        if used > most * CONNECTIONS_SHARE_MAX:
            # Another limit than the default is one that was set, or what the descriptors allow.
            to_raise = (
                "`bookie.limits.connections_max`, and the hard limit of descriptors (LimitNOFILE=) with it"
                if most == CONNECTIONS_MAX
                else "the lower one of the hard limit of descriptors (LimitNOFILE=) and "
                "`bookie.limits.connections_max`"
            )
            action = f"have clients share connections, or raise {to_raise}"
            yield name, f"{used:,} connections of {most:,}", action
    if seen.descriptors is not None and seen.descriptors < DESCRIPTORS_MIN:
        evidence = f"the hard limit is {seen.descriptors:,} descriptors"
        yield "this machine", evidence, f"raise it to {DESCRIPTORS_MIN:,} at least (ulimit -Hn, LimitNOFILE=)"


def _racks(seen: Observed) -> Found:
    if seen.cluster is None:
        return
    rack_of = {one.bookie_id: one.rack for one in seen.cluster.bookies if one.state != "down"}
    labelled = {rack for rack in rack_of.values() if rack}
    action = "start bookies with --rack, and clients with --placement rack-aware"
    unlabelled = sorted(name for name, rack in rack_of.items() if not rack)
    if labelled and unlabelled:
        yield ", ".join(unlabelled), "names no rack, and others do", action
    elif len(labelled) == 1 and len(rack_of) > 1:
        yield "cluster", f"all {len(rack_of)} bookies are on rack {labelled.pop()}", action
    elif not labelled and len(set(seen.hosts.values())) > 1:
        yield "cluster", f"no bookie on {len(set(seen.hosts.values()))} machines names its rack", action


def _metadata(seen: Observed) -> Found:
    if seen.metadata_s and (median := statistics.median(seen.metadata_s)) > METADATA_S_MAX:
        evidence = f"a read takes {median * 1000:,.0f} ms in the median of {len(seen.metadata_s)}"
        action = "creating ledgers, rolls and ensemble changes wait for it: look at its disk and network"
        yield "metadata store", evidence, action


def _set_back(seen: Observed) -> Found:
    for name, figures in seen.figures.items():
        if found := figures["metadata_set_back"]:
            action = "run `bookie-aio bookie accept-metadata --dry-run` (docs/OPERATING.md, restore)"
            evidence = (
                "the metadata store is older than the bookie: nothing given out before is dropped"
                if found.get("in_doubt_below")
                else "the metadata store was set back before this bookie came, and nobody has accepted it: "
                "no mark is lifted"
            )
            yield name, evidence, action


def _versions(seen: Observed) -> Found:
    if len(set(seen.versions.values())) > 1:
        by_version: dict[str, list[str]] = {}
        for name, version in sorted(seen.versions.items()):
            by_version.setdefault(version, []).append(name)
        evidence = "; ".join(f"{version}: {', '.join(names)}" for version, names in by_version.items())
        yield "cluster", evidence, "finish the upgrade: one release on all bookies"


def _clocks(seen: Observed) -> Found:
    for name, ahead_s in seen.clocks.items():
        if abs(ahead_s) > CLOCK_SKEW_S_MAX:
            where = "ahead of" if ahead_s > 0 else "behind"
            evidence = f"its clock is {abs(ahead_s):,.0f} s {where} this machine's"
            yield (
                name,
                evidence,
                "run a time service (NTP) on both: logs and creation times cannot be compared",
            )


def _recoveries(seen: Observed) -> Found:
    if seen.stuck:
        shown = ", ".join(map(str, seen.stuck[:5])) + (", …" if len(seen.stuck) > 5 else "")
        evidence = f"IN_RECOVERY without a change for {seen.watched_s:,.0f} s: {shown}"
        action = "start the bookies that are down, then `bookie-aio ledger recover LEDGER`"
        yield f"{len(seen.stuck):,} ledgers", evidence, action
    for ref, task in seen.cluster.auto_recovery.tasks if seen.cluster is not None else ():
        if task.attempts:
            evidence = f"{task.attempts} attempts to repair it failed: {task.error}"
            yield f"ledger {ref.ledger_id}", evidence, "`bookie-aio autorecovery status` shows all of them"


def _ids(seen: Observed) -> Found:
    if seen.ids_drawn < seen.id_floor:
        evidence = f"the next ledger id is {seen.ids_drawn:,}, and ids below {seen.id_floor:,} are refused"
        action = (
            "restore the metadata again with a higher --least-id, or create ledgers until the id is above"
        )
        yield "metadata store", evidence, action
    if seen.ids_drawn > LEDGER_ID_MAX * IDS_SHARE_MAX:
        evidence = f"ids up to {seen.ids_drawn:,} of {LEDGER_ID_MAX:,} have been given out"
        yield "metadata store", evidence, "something draws ids in vain: see `bookie_aio_requests_total`"


def _file_systems(seen: Observed) -> Found:
    for failed in seen.failed_directories:
        probe = f"a file of {_PROBE_BYTES // MIB} MiB"
        evidence = f"{probe} cannot be reserved, written and synced: {failed.error}"
        action = "look at the file system and at the limits of processes: a bookie writes no entry here"
        yield failed.path, evidence, _TO_DO.get(failed.number or 0, action)
    for one in seen.directories:
        if not one.tells_data:
            evidence = "the file system does not tell data from holes (SEEK_DATA)"
            action = "a start after a crash reads whole segments: use ext4, xfs or btrfs"
            yield one.path, evidence, action
        elif not one.reserves:
            evidence = "the file system does not reserve space without writing it (fallocate)"
            action = "each new segment is written twice: use ext4, xfs or btrfs"
            yield one.path, evidence, action


CHECKS: dict[str, Callable[[Observed], Found]] = {
    "cluster": _cluster,
    "damage": _damage,
    "disk space": _disk,
    "fsync": _fsync,
    "descriptors": _descriptors,
    "racks": _racks,
    "metadata latency": _metadata,
    "metadata set back": _set_back,
    "versions": _versions,
    "clocks": _clocks,
    "recoveries": _recoveries,
    "ledger ids": _ids,
    "file systems": _file_systems,
}


def examine(seen: Observed) -> list[Finding]:
    """Return all findings, in the order of `CHECKS`."""
    return [Finding(name, *each) for name, check in CHECKS.items() for each in check(seen)]


# --- looking ------------------------------------------------------------------------------------------


async def look_at_cluster(invocation: Invocation, seen: Observed, watch_s: float) -> None:
    """Look at the cluster that is named."""
    async with invocation.connect() as client:
        context = client._context
        begin = await _in_recovery(context)
        watch_until = time.monotonic() + watch_s
        seen.metadata_s = [await _timed(context) for _ in range(_METADATA_READS)]
        seen.cluster = await survey(context)
        directory = context.pool.directory.available
        await asyncio.gather(*(_ask(context, name, seen) for name in directory))
        for name, record in directory.items():
            seen.hosts[name] = split_address(record.addresses[0])[0]
            if "version" in record.properties:
                seen.versions[name] = record.properties["version"]
        addresses = {name: one.properties.get("http", "") for name, one in directory.items()}
        await asyncio.gather(*(_ask_the_time(name, each, seen) for name, each in addresses.items() if each))
        store = context.ledgers
        seen.id_floor = await store.floor()
        seen.ids_drawn = await store.store.ids_drawn(LEDGER_SEQUENCE)
        if begin:
            await asyncio.sleep(max(0.0, watch_until - time.monotonic()))
            seen.watched_s = watch_s
            seen.stuck = sorted(dict(begin.items() & (await _in_recovery(context)).items()))


async def _in_recovery(context: "ClientContext") -> dict[int, int]:
    """Return the ledgers that are IN_RECOVERY, with a hash of their metadata."""
    async with aclosing(all_metadata(context)) as found:
        return {
            ledger_id: hash(repr(metadata))
            async for ledger_id, metadata in found
            if not isinstance(metadata, MetadataCorruptError) and metadata.state is LedgerState.IN_RECOVERY
        }


async def _timed(context: "ClientContext") -> float:
    begin = time.perf_counter()
    await context.ledgers.store.read(KEY_CLUSTER)
    return time.perf_counter() - begin


async def _ask(context: "ClientContext", name: str, seen: Observed) -> None:
    try:
        seen.figures[name] = await figures_of(context, name, _INFO_TIMEOUT_S)
    except (BookKeeperError, *MALFORMED) as error:
        seen.unseen.append(f"the figures of {name}: {error}")


async def _ask_the_time(name: str, address: str, seen: Observed) -> None:
    try:
        seen.clocks[name] = await asyncio.to_thread(_clock_ahead_s, *split_address(address))
    except (OSError, http.client.HTTPException, ValueError) as error:
        seen.unseen.append(f"the clock of {name}, by HTTP at {address}: {error}")


def _clock_ahead_s(host: str, port: int) -> float:
    connection = http.client.HTTPConnection(host, port, timeout=_HTTP_TIMEOUT_S)
    try:
        begin = time.time()
        connection.request("HEAD", "/healthz")
        answer = connection.getresponse()
        here = (begin + time.time()) / 2
        told = email.utils.parsedate_to_datetime(answer.getheader("Date", "")).timestamp()
    finally:
        connection.close()
    # The time that was told is cut to a whole second.
    return max(told - here, 0.0) + min(told + 1 - here, 0.0)


def _check_directories(paths: Iterable[Path]) -> None:
    """Raise InvalidArgumentError where there is no such directory; other errors are found by the look."""
    for path in paths:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            usage_error(f"--dir {path}: there is no such directory")
        except OSError:
            continue


async def _look_at_directories(paths: Iterable[Path], seen: Observed) -> None:
    seen.descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if seen.descriptors == resource.RLIM_INFINITY:
        seen.descriptors = None
    for path in paths:
        try:
            seen.directories.append(await look_at_directory(path))
        except OSError as error:
            failed = FailedLook(str(path), error.strerror or str(error), error.errno)
            seen.failed_directories.append(failed)


async def look_at_directory(path: Path) -> DirectoryLook:
    """Try in a directory what a bookie's storage does there, in a file that is removed again.

    Raises:
        OSError: the directory cannot be written to, or has no room.
    """
    space = os.statvfs(path)
    descriptor, probe = tempfile.mkstemp(prefix=".bookie-aio-doctor-", dir=path)
    try:
        try:
            os.ftruncate(descriptor, _PROBE_BYTES)
            tells_data = not _has_data(descriptor)
            reserves = _reserve(descriptor) and not _has_data(descriptor)
            times = [await asyncio.to_thread(_sync_one, descriptor, each) for each in range(_PROBE_SYNCS)]
        finally:
            os.close(descriptor)
    finally:
        os.unlink(probe)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return DirectoryLook(str(path), free, total, times, tells_data, reserves)


def _reserve(descriptor: int) -> bool:
    """Reserve the space of the probe; return whether that can be done here."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(descriptor, 0, _PROBE_BYTES)
    except OSError as error:
        if error.errno not in _FALLOCATE_UNSUPPORTED:
            raise
        return False
    return True


def _has_data(descriptor: int) -> bool:
    """Return whether the file system tells of data in a file that was not written to."""
    with suppress(OSError, AttributeError):  # no data: an error of its own
        os.lseek(descriptor, 0, os.SEEK_DATA)
        return True
    return not hasattr(os, "SEEK_DATA")


def _sync_one(descriptor: int, number: int) -> float:
    os.pwrite(descriptor, bytes(4096), number * 4096)
    begin = time.perf_counter()
    os.fsync(descriptor)
    return time.perf_counter() - begin


# --- the command --------------------------------------------------------------------------------------


@command(app, "doctor")
async def doctor(
    invocation: Invocation,
    directories: Annotated[
        list[Path] | None,
        typer.Option(
            "--dir",
            file_okay=False,
            readable=False,
            help="A directory of this machine to try, by a small file; may be repeated.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="A recovery without a change for so long is stuck, if there is one.",
        ),
    ] = 5.0,
) -> int:
    """Look for what is wrong, or soon will be: each finding has its evidence, and what to do.

    Changes nothing in the cluster. With --dir alone, and no metadata store named, only this machine is looked
    at. A directory that cannot be written to is a finding. The clock of a bookie is known only where it
    serves --http.

    The exit code is 0 without a finding, and 1 with one.
    """
    seen = Observed()
    _check_directories(directories or ())
    if invocation.metadata or not directories:
        await look_at_cluster(invocation, seen, watch)
    if directories:
        await _look_at_directories(directories, seen)
    findings = examine(seen)
    document = {
        "findings": [one._asdict() for one in findings],
        "unseen": seen.unseen,
        "checks": list(CHECKS),
    }
    invocation.output.document(document, text=_text(findings, seen.unseen))
    return Exit.FAILURE if findings else Exit.OK


def _text(findings: Iterable[Finding], unseen: Iterable[str]) -> str:
    lines = []
    for one in findings:
        lines.append(f"{one.check}: {escape(one.subject)}: {escape(one.evidence)}")
        lines.append(f"  {one.action}")
    lines = lines or [f"nothing was found by {len(CHECKS)} checks"]
    return "\n".join([*lines, *(f"not seen: {escape(each)}" for each in unseen)])
