"""`bookie-aio bench`: throughput and latency against any cluster.

Owns the measuring loop. A latency is the time from the call of `add_entry` to the wake-up after the
acknowledgement, as an application sees it. Bursts share one time stamp, so that measuring costs one call per
burst and not per entry.

Latencies are counted in an HDR histogram. Without hdrhistogram they are counted in log-scaled buckets, which
grow by the factor 2^(1/32): the error of a percentile is below 2 %.

A result is printed as soon as it is there. What may fail then, a file or a deletion, costs no result.
"""

import asyncio
import errno
import math
import os
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

import client_aio
from client_aio.cli.ledger import AckQuorum, Ensemble, Quorums, WriteQuorum, quorums
from client_aio.cli.options import (
    Invocation,
    PasswordFile,
    Placement,
    PlacementOption,
    command,
    password_of,
    usage_error,
)
from client_aio.core.add_window import ENTRY_OVERHEAD_BYTES
from metadata.errors import NoSuchLedgerError

Bursts = deque[tuple[int, float]]
"""Bursts of adds, oldest first: the number of entries added at once, and the time."""

_STEPS_PER_DOUBLING = 32
_LOWEST_S = 1e-6
_BUCKETS = 32 * _STEPS_PER_DOUBLING  # up to 71 minutes


def take_oldest(bursts: Bursts, count: int) -> Iterator[tuple[int, float]]:
    """Take `count` entries off the oldest bursts; yield the number from each burst, and its time."""
    while count:
        entries, added = bursts.popleft()
        taken = min(entries, count)
        if taken < entries:
            bursts.appendleft((entries - taken, added))
        count -= taken
        yield taken, added


class LatencyBuckets:
    """Counts of latencies in log-scaled buckets. Pure: seconds in, seconds out."""

    def __init__(self) -> None:
        self.count = 0
        self.max_s = 0.0
        self._counts = [0] * _BUCKETS

    def record(self, seconds: float, count: int = 1) -> None:
        """Count a latency, `count` times."""
        if seconds > self.max_s:
            self.max_s = seconds
        step = int(math.log2(seconds / _LOWEST_S) * _STEPS_PER_DOUBLING) if seconds > _LOWEST_S else 0
        self._counts[min(step, _BUCKETS - 1)] += count
        self.count += count

    def percentile(self, percent: float) -> float:
        """Return the latency, in seconds, that `percent` of the values do not exceed; 0 without values."""
        rank = math.ceil(self.count * percent / 100)
        if rank >= self.count:
            return self.max_s
        seen = 0
        for step, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                middle: float = _LOWEST_S * 2 ** ((step + 0.5) / _STEPS_PER_DOUBLING)
                return min(middle, self.max_s)
        return self.max_s


app = typer.Typer(no_args_is_help=True, help="Measure a cluster.")

PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)
_SHOW_EVERY_S = 0.25


class Latencies:
    """Latencies in an HDR histogram, or in coarser buckets where hdrhistogram is not installed."""

    def __init__(self) -> None:
        try:
            from hdrh.histogram import HdrHistogram
        except ImportError:
            self._exact: HdrHistogram | None = None
        else:
            self._exact = HdrHistogram(1, 3_600_000_000, 3)  # microseconds, up to an hour
        self._buckets = LatencyBuckets()

    @property
    def is_exact(self) -> bool:
        """Return whether hdrhistogram is installed."""
        return self._exact is not None

    def record(self, seconds: float, count: int) -> None:
        """Count a latency, `count` times."""
        if self._exact is not None:
            self._exact.record_value(max(1, round(seconds * 1e6)), count)
        else:
            self._buckets.record(seconds, count)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile in milliseconds; 100 is the maximum."""
        if self._exact is not None:
            return float(self._exact.get_value_at_percentile(percent)) / 1e3
        return self._buckets.percentile(percent) * 1e3

    def write_distribution(self, path: Path) -> None:
        """Write the percentile distribution in the text form that HdrHistogram's plotter reads."""
        assert self._exact is not None
        with path.open("wb") as file:
            self._exact.output_percentile_distribution(file, 1000.0)


@dataclass
class Measured:
    """The counts of a run so far."""

    started: float
    latencies: Latencies = field(default_factory=Latencies)
    entries: int = 0
    bytes: int = 0

    def add(self, bursts: Bursts, acknowledged: int, moment: float, size: int) -> None:
        """Count `acknowledged` adds as done at `moment`, and take them off the oldest bursts."""
        self.entries += acknowledged
        self.bytes += acknowledged * size
        for count, added in take_oldest(bursts, acknowledged):
            self.latencies.record(moment - added, count)

    def row(self, what: str) -> dict[str, Any]:
        """Return the result as a row of output."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return {
            "what": what,
            "entries": self.entries,
            "seconds": round(seconds, 3),
            "entries_per_s": round(self.entries / seconds),
            "mb_per_s": round(self.bytes / seconds / 1e6, 2),
            **{_name(percent): round(self.latencies.percentile_ms(percent), 3) for percent in PERCENTILES},
        }

    def line(self) -> str:
        """Return the current figures as a line of progress."""
        row = self.row("")
        return (
            f"{row['entries_per_s']:,}/s  {row['mb_per_s']:,.1f} MB/s  "
            f"p50 {row[_name(50.0)]:.2f} ms  p99 {row[_name(99.0)]:.2f} ms"
        )


def _name(percent: float) -> str:
    return "max_ms" if percent == 100 else f"p{percent:g}_ms"


Histogram = Annotated[
    Path | None, typer.Option("--histogram", help="Write the percentile distribution to this file.")
]
EntryBytes = Annotated[int, typer.Option(min=0, max=4 * 1024 * 1024, help="Size of an entry.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="How long to measure, unless --entries is given.")]
Entries = Annotated[int | None, typer.Option(min=1, help="How many entries to write, in all.")]


@command(app, "write")
async def write(
    invocation: Invocation,
    entry_bytes: EntryBytes = 1024,
    in_flight: Annotated[
        int,
        typer.Option(
            min=1,
            help="Adds not acknowledged yet, per ledger; fewer where their bytes exceed max_in_flight_bytes.",
        ),
    ] = 1000,
    batch: Annotated[
        int, typer.Option(min=1, help="Entries added at a time, with one future; 1: each by itself.")
    ] = 1,
    ensemble: Ensemble = 3,
    write_quorum: WriteQuorum = None,
    ack_quorum: AckQuorum = None,
    seconds: Seconds = 10.0,
    entries: Entries = None,
    ledgers: Annotated[int, typer.Option(min=1, help="Ledgers written at once, by one client.")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the ledgers; else they are deleted.")] = False,
    placement: PlacementOption = Placement.WEIGHTED,
    histogram: Histogram = None,
) -> None:
    """Write entries of random bytes with a fixed number in flight; print rate and latencies.

    No more bytes are in flight than the client's max_in_flight_bytes, 64 MiB by default, for each ledger. The
    result says how many entries were.
    """
    _check_histogram(invocation, histogram)
    sizes = quorums(ensemble, write_quorum, ack_quorum)
    payload = random.SystemRandom().randbytes(entry_bytes)
    async with (
        invocation.connect(placement=placement.policy) as client,
        _own_ledgers(client, ledgers, sizes, invocation.output.note, keep=keep) as writers,
    ):
        asked, in_flight = in_flight, min(in_flight, _room(writers[0], entry_bytes))
        if in_flight < asked:
            invocation.output.note(
                f"{in_flight:,} entries are in flight, not {asked:,}: max_in_flight_bytes allows no more"
            )
        with invocation.output.progress() as progress:  # before the clock starts: this takes time of its own
            measured = Measured(time.perf_counter())
            deadline = measured.started + seconds if entries is None else float("inf")
            task = progress.add_task("write", total=entries or seconds, figures="")

            def show() -> None:
                done = measured.entries if entries else time.perf_counter() - measured.started
                progress.update(task, completed=done, figures=measured.line())

            async with asyncio.TaskGroup() as group:
                for writer, share in zip(writers, _shares(entries, ledgers), strict=True):
                    adding = _Adding(writer, payload, batch)
                    group.create_task(_fill(adding, in_flight, share, deadline, measured, show))
        row = measured.row("write")
        row |= {"entry_bytes": entry_bytes, "in_flight": in_flight, "batch": batch, "ledgers": ledgers}
        row |= sizes
        if keep:
            row["ledger_ids"] = [writer.ledger_id for writer in writers]
        _print(invocation, row, measured, histogram)


def _room(writer: client_aio.LedgerWriter, entry_bytes: int) -> int:
    """Return how many entries of this size are in flight when `drain` begins to wait; one at least."""
    return max(writer.max_in_flight_bytes // (entry_bytes + ENTRY_OVERHEAD_BYTES), 1)


@asynccontextmanager
async def _own_ledgers(
    client: client_aio.Client,
    count: int,
    sizes: Quorums,
    note: Callable[[str], None],
    *,
    keep: bool = False,
) -> AsyncGenerator[list[client_aio.LedgerWriter], None]:
    """Create ledgers, and close them on exit; also delete them unless `keep`, after Ctrl-C as well.

    Args:
        note: is told the ledgers that could not be deleted.
    """
    writers: list[client_aio.LedgerWriter] = []
    errors: list[Exception] = []
    try:
        for _ in range(count):
            await _create(client, sizes, writers)
        client_aio.tune_gc()  # again, with the client and its writers
        yield writers
        for writer in writers:
            await writer.close()
    finally:
        if not keep:
            errors = await _delete(client, [writer.ledger_id for writer in writers], note)
    if errors:  # an error of the run itself comes before these
        raise errors[0]


async def _delete(
    client: client_aio.Client, ledger_ids: list[int], note: Callable[[str], None]
) -> list[Exception]:
    """Try to delete each ledger, and tell which ones are left; return the errors."""
    left, errors = ledger_ids.copy(), list[Exception]()
    try:
        for ledger_id in ledger_ids:
            try:
                await client.delete_ledger(ledger_id)
            except NoSuchLedgerError:
                pass
            except Exception as error:
                errors.append(error)
                continue
            left.remove(ledger_id)
    finally:
        if left:
            why = f": {errors[0]}" if errors else ""
            note(f"not deleted, see `bookie-aio ledger delete`: {', '.join(map(str, left))}{why}")
    return errors


async def _create(client: client_aio.Client, sizes: Quorums, writers: list[client_aio.LedgerWriter]) -> None:
    """Create a ledger to the end even when cancelled: a half-made ledger could not be deleted."""

    async def create() -> None:
        writers.append(await client.create_ledger(**sizes))

    creating = asyncio.create_task(create())
    try:
        await asyncio.shield(creating)
    except asyncio.CancelledError:
        await asyncio.gather(creating, return_exceptions=True)
        raise


def _shares(entries: int | None, ledgers: int) -> list[int | None]:
    if entries is None:
        return [None] * ledgers
    return [entries // ledgers + (number < entries % ledgers) for number in range(ledgers)]


class _Adding:
    """The adds of one writer that are outstanding, oldest first: of single entries, or of batches."""

    def __init__(self, writer: client_aio.LedgerWriter, payload: bytes, batch: int) -> None:
        self.payload = payload
        self.entries = 0  # outstanding
        self._writer = writer
        self._batch = batch
        self._futures: deque[asyncio.Future[Any]] = deque()
        self._counts: deque[int] = deque()  # of batches

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, count: int) -> None:
        """Add so many entries."""
        self.entries += count
        writer, payload, batch = self._writer, self.payload, self._batch
        if batch == 1:
            self._futures.extend([writer.add_entry(payload) for _ in range(count)])
            return
        while count:
            taken = min(count, batch)
            self._futures.append(writer.add_batch([payload] * taken))
            self._counts.append(taken)
            count -= taken

    async def acknowledged(self) -> int:
        """Wait for the oldest add; return how many entries have been acknowledged since the last call."""
        futures, counts, count = self._futures, self._counts, 0
        await futures[0]
        while futures and futures[0].done():
            futures.popleft()
            count += counts.popleft() if counts else 1
        self.entries -= count
        return count


async def _fill(
    adding: _Adding,
    in_flight: int,
    limit: int | None,
    deadline: float,
    measured: Measured,
    show: Callable[[], None],
) -> None:
    """Keep `in_flight` entries outstanding until the limit or the deadline; then wait for the last ones."""
    now = time.perf_counter
    bursts: Bursts = deque()
    issued, shown = 0, now()
    while True:
        if now() < deadline:
            room = in_flight - adding.entries
            room = room if limit is None else min(room, limit - issued)
            if room > 0:
                bursts.append((room, now()))
                adding.add(room)
                issued += room
        if not adding:
            return
        acknowledged = await adding.acknowledged()
        moment = now()
        measured.add(bursts, acknowledged, moment, len(adding.payload))
        if moment - shown > _SHOW_EVERY_S:
            shown = moment
            show()


@command(app, "read")
async def read(
    invocation: Invocation,
    ledger_id: Annotated[
        int | None,
        typer.Argument(min=0, metavar="[LEDGER]", help="The ledger to read; default: one written for it."),
    ] = None,
    at_random: Annotated[
        bool, typer.Option("--random", help="Single entries at random places instead of all in order.")
    ] = False,
    in_flight: Annotated[int, typer.Option(min=1, help="Readers at once.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure.")] = 10.0,
    entries: Annotated[int, typer.Option(min=1, help="Size of the ledger that is written for it.")] = 200_000,
    entry_bytes: EntryBytes = 1024,
    ensemble: Ensemble = 3,
    write_quorum: WriteQuorum = None,
    ack_quorum: AckQuorum = None,
    password_file: PasswordFile = None,
    histogram: Histogram = None,
) -> None:
    """Read a ledger for a while, again from its start when it ends; print rate and latencies.

    Latencies are those of one batch as the client hands it out, or with --random of one entry. A password
    is for the ledger that is named: one written for this has none.
    """
    _check_histogram(invocation, histogram)
    sizes, password = quorums(ensemble, write_quorum, ack_quorum), password_of(password_file)
    async with invocation.connect() as client, AsyncExitStack() as stack:
        if ledger_id is None:
            (writer,) = await stack.enter_async_context(
                _own_ledgers(client, 1, sizes, invocation.output.note)
            )
            payload = random.SystemRandom().randbytes(entry_bytes)
            await writer.add_entries(payload for _ in range(entries))
            await writer.close()
            ledger_id, password = writer.ledger_id, b""
        async with client.open_ledger(ledger_id, password=password) as reader:
            if reader.last_add_confirmed < 0:
                usage_error(f"ledger {ledger_id} has no entry to read")
            with invocation.output.progress() as progress:
                measured = Measured(time.perf_counter())
                task = progress.add_task("read", total=seconds, figures="")

                def show() -> None:
                    done = time.perf_counter() - measured.started
                    progress.update(task, completed=done, figures=measured.line())

                run = _read_at_random if at_random else _read_in_order
                async with asyncio.TaskGroup() as group:
                    for _ in range(in_flight):
                        group.create_task(run(reader, measured.started + seconds, measured, show))
            row = measured.row("read")
            row |= {"ledger_id": ledger_id, "random": at_random, "in_flight": in_flight}
            _print(invocation, row, measured, histogram)


async def _read_in_order(reader: Any, deadline: float, measured: Measured, show: Callable[[], None]) -> None:
    now = time.perf_counter
    shown = now()
    while now() < deadline:
        started = now()
        async with aclosing(reader.read_batches(0, reader.last_add_confirmed)) as batches:
            async for batch in batches:
                moment = now()
                measured.latencies.record(moment - started, 1)
                measured.entries += len(batch.offsets) - 1
                measured.bytes += len(batch.buffer)
                started = moment
                if moment - shown > _SHOW_EVERY_S:
                    shown = moment
                    show()
                if moment > deadline:
                    return


async def _read_at_random(reader: Any, deadline: float, measured: Measured, show: Callable[[], None]) -> None:
    now = time.perf_counter
    rng = random.Random()
    shown = now()
    while (started := now()) < deadline:
        entry_id = rng.randint(0, reader.last_add_confirmed)
        async with aclosing(reader.read(entry_id, entry_id)) as entries:
            async for entry in entries:
                measured.bytes += len(entry.data)
        moment = now()
        measured.latencies.record(moment - started, 1)
        measured.entries += 1
        if moment - shown > _SHOW_EVERY_S:
            shown = moment
            show()


def _check_histogram(invocation: Invocation, path: Path | None) -> None:
    if path is not None:
        try:
            _check_writable(path)
        except OSError as error:
            usage_error(f"--histogram {path}: {error.strerror or error}")
    if Latencies().is_exact:
        return
    if path is not None:
        usage_error("--histogram needs hdrhistogram: pip install '.[bench]' in a checkout")
    invocation.output.note(
        "hdrhistogram is not installed: percentiles are within 2 % (pip install '.[bench]' in a checkout)"
    )


def _check_writable(path: Path) -> None:
    """Raise OSError where a file could not be written; what it holds stays, and a new one is removed again.

    A pipe is not opened: its reader would take that for the whole.
    """
    is_there = os.path.lexists(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    with path.open("ab"):
        pass
    if not is_there:
        path.unlink()


def _print(invocation: Invocation, row: dict[str, Any], measured: Measured, histogram: Path | None) -> None:
    """Print the result, then write the histogram: neither is lost where the other one fails."""
    try:
        invocation.output.document(row)
    finally:
        if histogram is not None:
            _write_histogram(measured, histogram)


def _write_histogram(measured: Measured, path: Path) -> None:
    try:
        measured.latencies.write_distribution(path)
    except OSError as error:  # one of a write names no file
        raise OSError(f"the histogram {path} was not written: {error.strerror or error}") from error
