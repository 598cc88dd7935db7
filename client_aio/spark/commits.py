"""Commits of jobs to a log, and deletion of ledgers that will never be committed. Runs in the driver.

A ledger that a task wrote names in its custom metadata the log, job and batch that it is for (`provenance`).
It is *garbage* once it can never be listed any more:

- after a batch job's commit, refused or not, or its abort: every ledger of the job that the log does not
  list. A job commits once.
- after the commit of a query's batch N: every ledger of its batches up to N that the log does not list. A
  later commit of batch N finds the batch recorded: it is dropped, or refused for other rows. A commit of an
  older batch is refused.

The driver deletes garbage at once. A driver that dies in between leaves orphans: ledgers that bear a log's
tag and are in no log. `sweep_orphans` deletes them after a grace period. It *condemns* each one first, so
that a driver that was only slow cannot commit it any more:

1. The ledger's metadata are marked, by compare-and-set. A driver that adds a ledger to a log reads the list,
   then looks for the mark, and refuses.
2. The version of the log's list is bumped. A driver that looked before the mark was set fails its
   compare-and-set, and looks again.
3. The list is read once more. A ledger listed now was committed before the bump, and stays; its mark then
   means nothing. The other condemned ledgers can never be listed, and are deleted.

So safety does not depend on the grace period: a job that runs for longer, and is swept, fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import TYPE_CHECKING

import client_aio
from client_aio.log.add_ledgers import CONDEMNED, Addition, add_to_log
from client_aio.spark import provenance
from client_aio.spark.options import AWAY, Outage
from client_aio.spark.passwords import password_of, unlock_log
from metadata.errors import (
    BookKeeperError,
    InvalidArgumentError,
    NoSuchLedgerError,
    NoSuchLogError,
    NotEnoughBookiesError,
    Outcome,
    StaleTransactionError,
)
from metadata.model.log import check_log_name

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence

    from client_aio.handles import AwaitableContext
    from client_aio.log.add_ledgers import AddedToLog
    from client_aio.spark.options import WriteOptions
    from client_aio.spark.write_task import Job
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead


logger = logging.getLogger(__name__)

_AT_ONCE = 32
_NOWHERE = -1
"""The floor of a commit that looks for no leftovers."""


def _connect(options: WriteOptions) -> AwaitableContext[client_aio.Client]:
    return client_aio.connect(options.metadata, metadata_timeout_s=options.outage_timeout)


@dataclass(frozen=True, slots=True)
class LogState:
    """The log that a write is for, as found before the write."""

    is_used: bool
    """Whether the log exists and lists ledgers."""
    written: provenance.Written | None


async def inspect_log(options: WriteOptions, *, needs_bookies: bool) -> LogState:
    """Check that a write can begin (metadata store, number of bookies, password), and return the log's state.

    Raises:
        MetadataUnavailableError, NotEnoughBookiesError, InvalidArgumentError.
        UnauthorizedAccessError: the password is not that of the log's ledgers.
    """
    async with _connect(options) as client:
        running = len(client.bookies)
        if needs_bookies and running < options.ensemble_size:
            raise NotEnoughBookiesError(
                f"{running} bookies run, and the option ensembleSize is {options.ensemble_size}: start more, "
                "or set ensembleSize, writeQuorum and ackQuorum lower"
            )
        try:
            log = await client.log_metadata(options.log)
        except NoSuchLogError:
            return LogState(False, None)
        await unlock_log(client, log, options)
        return LogState(bool(log.rows), provenance.Written.of_custom(log.custom))


async def draw_floor(options: WriteOptions) -> int:
    """Draw a ledger id below those of all ledgers that tasks started later will create.

    A client draws ids in blocks of its own, upwards, so that a client connected later has higher ids.
    """
    async with _connect(options) as client:
        return await client._context.ledgers.allocate_id()


class StaleCheckpointError(StaleTransactionError):
    """The log has recorded a later batch of the query, or other rows under the batch's number."""


async def commit(job: Job, ledger_ids: Sequence[int], *, replace: bool, floor: int | None = None) -> bool:
    """Add a job's ledgers to its log by one compare-and-set.

    False for the batch that the log recorded last, or where `ifExists` is ignore and the log holds records.

    Args:
        floor: leftovers from this id on are looked for; by default from the last ledger listed before, or the
            first one of these. Without either nothing is looked for: a sweep finds what is older.

    Raises:
        BookKeeperError: the log could not be changed, or the outcome is unknown. Nothing was deleted.
        InvalidArgumentError: the log has other columns now than when the write was planned; or it holds
            records now, and `ifExists` is error. Nothing was added, and the job's ledgers are deleted.
        StaleCheckpointError: the log has recorded a later batch of the query, or this batch with other rows.
            Nothing was added, and the batch's ledgers are deleted. Dropped as "committed before", rows that
            are in no log would be lost.
    """
    options = job.options
    transaction = None if job.batch_id is None else (job.job_id, job.batch_id)
    async with _connect(options) as client:
        if floor is None:
            listed = await listed_in(client, options.log)
            floor = min([*sorted(listed)[-1:], *ledger_ids], default=_NOWHERE)
        custom = job.written.to_custom_of_log() if replace else job.written.to_custom()
        fits = _fit_check_if_new(options, custom)
        content = job.content if options.if_replayed == "compare" else ""
        addition = changed(Addition.check(ledger_ids, transaction, replace, custom, content), fits=fits)
        try:
            added = await _add_patiently(client, options, addition)
        except _LogIsUsedError as error:
            await _delete_leftovers(client, job, floor)
            if options.if_exists == "error":
                raise InvalidArgumentError(str(error)) from None
            logger.info("%s: nothing is written", error)
            return False
        except StaleTransactionError as error:
            # Only the batch's own ledgers: another driver may be committing the same batch.
            await _delete_all(client, options, ledger_ids)
            raise StaleCheckpointError(f"{error}. {_STALE}") from None
        except InvalidArgumentError:
            if job.batch_id is None:
                await _delete_leftovers(client, job, floor)
            else:
                await _delete_all(client, options, ledger_ids)
            raise
        await _delete_leftovers(client, job, floor)
        if added.repeated:
            logger.info("log=%s batch %s was committed before, and is dropped", options.log, transaction)
        return not added.repeated


async def _add_patiently(client: client_aio.Client, options: WriteOptions, addition: Addition) -> AddedToLog:
    """Add to the log; while servers are out of reach try again, where that cannot add anything twice."""
    loop = asyncio.get_running_loop()
    outage = Outage(options.outage_timeout, logger.warning)
    while True:
        asked = loop.time()
        try:
            return await add_to_log(
                client._context, client._lists(options.log), addition, password_of(options)
            )
        except AWAY as error:
            if error.outcome is not Outcome.NOT_DONE and addition.transaction is None:
                raise
            await asyncio.sleep(outage.pause_s(error, loop.time(), asked))


_STALE = (
    "Spark replays its last batch, with the same rows, and no earlier one. So the checkpoint is older than "
    "the log (restored from a copy), or two drivers run the query, or the query gives other rows each time "
    "it runs. Go on with the newest checkpoint, or with a new one and the option startingPosition. For a "
    "query that gives other rows each time, such as by rand(), set the option ifReplayed to drop"
)


async def _delete_all(client: client_aio.Client, options: WriteOptions, ledger_ids: Sequence[int]) -> None:
    try:
        for ledger_id in ledger_ids:
            await _delete(client, options, ledger_id)
    except BookKeeperError as error:  # a later sweep deletes them
        logger.warning("log=%s what was refused is not deleted yet: %s", options.log, error)


class _LogIsUsedError(InvalidArgumentError):
    """The log holds records by now, and `ifExists` forbids adding to it."""


def _fit_check_if_new(options: WriteOptions, custom: Mapping[str, bytes]) -> Callable[[LogHead], None]:
    """Return the check of `fit_check`, which also raises where `ifExists` forbids adding to this log."""

    def fits(head: LogHead) -> None:
        if head.rows and options.if_exists != "append":
            raise _LogIsUsedError(
                f"log {options.log!r} holds records that were added while this was written, and ifExists is "
                f"{options.if_exists}: choose another name, or append"
            )
        fit_check(custom)(head)

    return fits


def fit_check(custom: Mapping[str, bytes]) -> Callable[[LogHead], None]:
    """Return a check that the log's encoding and columns still fit ledgers with this custom metadata.

    `add_to_log` calls it with the log's head in each attempt at the compare-and-set.
    """
    return lambda head: provenance.check_fit(custom, head.custom, is_used=bool(head.rows))


async def add_bytes(client: client_aio.Client, options: WriteOptions, ledger_ids: Sequence[int]) -> None:
    """Add ledgers of plain bytes to a log.

    Raises:
        InvalidArgumentError: the log holds rows of columns, and its readers would decode the bytes as such
            rows.
        BookKeeperError: the ledgers could not be added. They are deleted, unless the outcome is unknown.
    """
    addition = Addition.check(ledger_ids, None, False, {})
    addition = changed(addition, fits=fit_check(provenance.Written().to_custom()))
    try:
        await _add_patiently(client, options, addition)
    except BookKeeperError as error:
        if error.outcome is Outcome.NOT_DONE:
            await _delete_all(client, options, ledger_ids)
        raise


async def delete_garbage(job: Job, floor: int) -> None:
    """Delete the ledgers of a job that has been aborted."""
    async with _connect(job.options) as client:
        await _delete_garbage(client, job, floor)


async def delete(job: Job, ledger_ids: Sequence[int]) -> None:
    """Delete ledgers whose commit was never attempted."""
    async with _connect(job.options) as client:
        for ledger_id in ledger_ids:
            await _delete(client, job.options, ledger_id)


async def _delete_leftovers(client: client_aio.Client, job: Job, floor: int) -> None:
    try:
        await _delete_garbage(client, job, floor)
    except BookKeeperError as error:  # a later sweep deletes them
        logger.warning("log=%s what is not in it is not deleted yet: %s", job.options.log, error)


async def _delete_garbage(client: client_aio.Client, job: Job, floor: int) -> None:
    if floor == _NOWHERE:
        return
    listed = await listed_in(client, job.options.log)
    async with contextlib.aclosing(_metadata_from(client, floor, but=listed)) as found:
        async for metadata in found:
            if _is_garbage(job, metadata):
                await _delete(client, job.options, metadata.ledger_id)


async def _metadata_from(
    client: client_aio.Client, first: int, *, but: Collection[int] = ()
) -> AsyncGenerator[LedgerMetadata, None]:
    """Yield the metadata of all ledgers from an id on, but some, in order; a few are read at once."""

    async def read(ledger_id: int) -> LedgerMetadata | None:
        try:
            return await client.ledger_metadata(ledger_id)
        except NoSuchLedgerError:
            return None

    ids: list[int] = []
    async with contextlib.aclosing(client.list_ledgers(first=first)) as all_ids:
        async for ledger_id in all_ids:
            if ledger_id not in but:
                ids.append(ledger_id)
            if len(ids) == _AT_ONCE:
                for one in await asyncio.gather(*map(read, ids)):
                    if one is not None:
                        yield one
                ids.clear()
    for one in await asyncio.gather(*map(read, ids)):
        if one is not None:
            yield one


def _is_garbage(job: Job, metadata: LedgerMetadata) -> bool:
    """Return whether an unlisted ledger can never be listed, now that the job is committed or aborted."""
    custom = metadata.custom
    if (
        custom.get(provenance.LOG) != job.options.log.encode()
        or custom.get(provenance.JOB) != job.job_id.encode()
    ):
        return False
    if job.batch_id is None:
        return True
    return int(custom.get(provenance.BATCH, b"-1")) <= job.batch_id


async def _delete(client: client_aio.Client, options: WriteOptions, ledger_id: int) -> None:
    with contextlib.suppress(NoSuchLedgerError):
        await client.delete_ledger(ledger_id, password=password_of(options))


async def listed_in(client: client_aio.Client, log: str) -> Collection[int]:
    """Return the ledgers that a log lists now; () where the log does not exist."""
    try:
        metadata = await client.log_metadata(log)
    except NoSuchLogError:
        return ()
    return {row.ledger_id for row in metadata.rows}


GRACE_S = 24 * 3600.0


async def sweep_orphans(uri: str, *, log: str, grace_s: float = GRACE_S, password: bytes = b"") -> list[int]:
    """Delete the ledgers that Spark jobs wrote for a log, older than the grace period, that it does not list.

    Reads the metadata of every ledger. Safe at any time. A job that began before the grace period and still
    runs fails at its commit. After cancellation the next call deletes the remaining ledgers.

    Args:
        password: the password of the ledgers that have one.

    Returns:
        The ids of the ledgers deleted.

    Raises:
        InvalidArgumentError: no log can have that name.
        MetadataUnavailableError: the metadata store cannot be reached.
        UnauthorizedAccessError: ledgers have a password, and this is not it. Nothing was deleted.
    """
    check_log_name(log)
    async with client_aio.connect(uri) as client:
        made = await _made_for(client, log)
        locked = {one.ledger_id: one for one in made if one.password is not None}
        for one in [*locked.values()][:1]:
            await client._context.unlock(one, password)
        listed = await listed_in(client, log)
        unlisted = [one.ledger_id for one in made if one.ledger_id not in listed]
        condemned = [
            each for each in unlisted if await _is_old(client, each, grace_s) and await condemn(client, each)
        ]
        if not condemned:
            return []
        await _bump(client, log)
        listed = await listed_in(client, log)
        deleted = []
        for ledger_id in condemned:
            if ledger_id in listed:
                continue
            try:
                await client.delete_ledger(ledger_id, password=password if ledger_id in locked else b"")
            except BookKeeperError as error:
                logger.warning("ledger=%d was left over and is not deleted yet: %s", ledger_id, error)
            else:
                deleted.append(ledger_id)
        return deleted


async def _is_old(client: client_aio.Client, ledger_id: int, grace_s: float) -> bool:
    """Return whether a ledger is so old by the metadata store's own clock, not by this machine's."""
    try:
        return await client._context.ledgers.age_s(ledger_id) >= grace_s
    except NoSuchLedgerError:
        return False


async def _bump(client: client_aio.Client, log: str) -> None:
    """Change the version of a log's list, so that a compare-and-set from an earlier version conflicts."""
    lists = client._lists(log)

    async def same(head: LogHead) -> LogHead:
        return head

    with contextlib.suppress(NoSuchLogError):
        head, version = await lists.read(sync=True)
        await lists.change(head, version, same)


async def condemn(client: client_aio.Client, ledger_id: int) -> bool:
    """Mark a ledger, so that no driver adds it to a log; False where it does not exist."""
    context = client._context
    try:
        # Its writer may be alive, and another sweep may be running.
        await context.ledgers.tag(ledger_id, CONDEMNED, b"1", draw_token=context.draw_token)
    except NoSuchLedgerError:
        return False
    return True


async def _made_for(client: client_aio.Client, log: str) -> list[LedgerMetadata]:
    async with contextlib.aclosing(_metadata_from(client, 0)) as found:
        return [one async for one in found if one.custom.get(provenance.LOG) == log.encode()]
