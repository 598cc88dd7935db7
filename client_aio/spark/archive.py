"""Closed ledgers to Parquet, and back: an export is a folder with the entries and a manifest.

    FOLDER/entries/        Parquet: ledger_id, entry_id, value: the stored bytes, compressed or not
    FOLDER/manifest/       one line of JSON: the log with its custom metadata, and of each ledger its custom
                           metadata, its quorums, its numbers of entries and bytes, and a fingerprint

An import writes new ledgers with the same entries under the same entry ids, and compares their fingerprints
with the manifest's. Only then it adds all of them to a log by one compare-and-set. The folder may be on any
file system that Spark writes to.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import client_aio
import client_aio.sync
from client_aio.core.log_chain import TAG
from client_aio.log.add_ledgers import CONDEMNED, Addition, add_to_log
from client_aio.spark import provenance
from client_aio.spark.commits import fit_check
from client_aio.spark.jobs import metadata_of
from client_aio.spark.passwords import PasswordPlace, password_of, settled_place, unlock, unlock_log
from client_aio.sync.loop_thread import get_loop_thread
from metadata.errors import BookKeeperError, InvalidArgumentError, NoSuchLogError
from metadata.ids import check_ledger_id
from metadata.model.ledger import DIGEST_CRC, DIGEST_HMAC, check_custom, check_quorums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

    from metadata.model.ledger import LedgerMetadata

FORMAT_VERSION = 2
_IMPORTED = "old long, ledger_id long"
_NOT_IMPORTED = frozenset({provenance.LOG, provenance.JOB, provenance.BATCH, TAG, CONDEMNED})


@dataclass(frozen=True, slots=True)
class Archived:
    """The result of an export or an import."""

    ledger_ids: tuple[int, ...]
    """The ledgers exported, or the new ledgers of the import."""
    entries: int
    size: int
    """Payload bytes."""


def export(
    spark: SparkSession,
    uri: str,
    folder: str,
    *,
    log: str | None = None,
    ledger_ids: Iterable[int] | None = None,
    password_file: str | None = None,
    password_env: str | None = None,
) -> Archived:
    """Write the closed ledgers of a log, or those named, to a folder that must not exist.

    Ledgers that are not CLOSED are left out: their content is not settled.

    Args:
        password_file: a file with the password of the ledgers that have one, by its path on each executor; or
            `password_env`, a variable there, by default BOOKIE_AIO_PASSWORD. The export has the written
            bytes, without any protection of its own.

    Raises:
        UnauthorizedAccessError: the password is not that of the ledgers.
        InvalidArgumentError: neither or both of log and ledgers are named, or a ledger twice.
        NoSuchLogError, NoSuchLedgerError: there is none such.
    """
    if (log is None) == (ledger_ids is None):
        raise InvalidArgumentError("name a log, or ledgers, and not both")
    place = settled_place(password_file, password_env)
    manifest, ids = get_loop_thread().run(_manifest(uri, log, ledger_ids, place))
    frame = _entries_of(spark, uri, ids, place)
    frame.write.mode("error").parquet(f"{folder}/entries")
    prints = _fingerprints(spark.read.parquet(f"{folder}/entries"))
    for ledger in manifest["ledgers"]:
        found = prints.get(ledger["ledger_id"], (0, 0, 0))
        if found[:2] != (ledger["entries"], ledger["bytes"]):
            raise BookKeeperError(
                f"ledger {ledger['ledger_id']} has {ledger['entries']} entries of {ledger['bytes']} bytes, "
                f"and {found[0]} of {found[1]} bytes were exported",
                ledger_id=ledger["ledger_id"],
            )
        ledger["fingerprint"] = found[2]
    text = spark.createDataFrame([(json.dumps(manifest),)], "value string")
    text.coalesce(1).write.mode("error").text(f"{folder}/manifest")
    return _sum_up(ids, manifest)


def import_(
    spark: SparkSession,
    uri: str,
    folder: str,
    *,
    log: str,
    again: bool = False,
    password_file: str | None = None,
    password_env: str | None = None,
) -> Archived:
    """Write the ledgers of an export anew, and add them to a log, all at once.

    Args:
        again: whether to add them once more to a log that has them already.
        password_file: a file with the password that the ledgers get, by its path on each executor; or
            `password_env`, a variable there, by default BOOKIE_AIO_PASSWORD.

    Raises:
        InvalidArgumentError: the folder holds no export of a known version, or a damaged one. Or its ledgers
            had a password, and none is given. Or the log has other columns, or has this export already.
        UnauthorizedAccessError: the password is not that of the log's present ledgers.
        BookKeeperError: the written ledgers do not have the manifest's fingerprints. Nothing was added; the
            new ledgers are deleted, or left to the sweep.
    """
    manifest = _read_manifest(spark, folder)
    place = settled_place(password_file, password_env)
    ledgers = {ledger["ledger_id"]: ledger for ledger in manifest["ledgers"]}
    _check_protection(ledgers, place)
    custom = _custom_of(manifest)
    job = f"import-{manifest['id']}"
    get_loop_thread().run(_check_log(uri, log, custom, place, None if again else job))
    entries = _read_entries(spark, folder, ledgers)
    rows = (
        entries.repartition(max(1, min(len(ledgers), 200)), "ledger_id")
        .sortWithinPartitions("ledger_id", "entry_id")
        .mapInArrow(_importer(uri, log, job, ledgers, place), _IMPORTED)
        .collect()
    )
    made = {row.old: row.ledger_id for row in rows}
    for old in ledgers:
        if old not in made:  # an empty ledger has no entry to be written by a task
            made[old] = get_loop_thread().run(
                _make_empty(uri, _settings(log, job, ledgers[old], password_of(place)))
            )
    ids = [made[old] for old in ledgers]
    prints = _fingerprints(_entries_of(spark, uri, ids, place))
    for old, ledger in ledgers.items():
        if prints.get(made[old], (0, 0, 0)) != _told(ledger):
            raise BookKeeperError(
                f"ledger {made[old]}, made of exported ledger {old}, differs from what the manifest says"
            )
    get_loop_thread().run(_add(uri, log, ids, custom, password_of(place), None if again else job))
    return _sum_up(ids, manifest)


def _sum_up(ids: Iterable[int], manifest: dict[str, Any]) -> Archived:
    ledgers = manifest["ledgers"]
    return Archived(
        tuple(ids), sum(each["entries"] for each in ledgers), sum(each["bytes"] for each in ledgers)
    )


def _entries_of(spark: SparkSession, uri: str, ids: list[int], place: PasswordPlace) -> DataFrame:
    if not ids:
        return spark.createDataFrame([], "ledger_id long, entry_id long, value binary")
    reader = spark.read.format("ledger").option("metadata", uri).option("ledger", ",".join(map(str, ids)))
    return reader.options(**place.as_options(), encoding="raw", columns="ledger_id,entry_id,value").load()


def _fingerprints(entries: DataFrame) -> dict[int, tuple[int, int, int]]:
    """Return for each ledger its entries, their bytes, and a number that changes with any of them."""
    rows = (
        entries.groupBy("ledger_id")
        .agg(
            *(
                _expr("count(*) as entries"),
                _expr("coalesce(sum(length(value)), 0) as size"),
                _expr("bit_xor(xxhash64(entry_id, value)) as fingerprint"),
            )
        )
        .collect()
    )
    return {row.ledger_id: (row.entries, row["size"], row.fingerprint) for row in rows}


def _expr(text: str) -> Any:
    from pyspark.sql import functions

    return functions.expr(text)


async def _manifest(
    uri: str, log: str | None, ledger_ids: Iterable[int] | None, place: PasswordPlace
) -> tuple[dict[str, Any], list[int]]:
    async with client_aio.connect(uri) as client:
        custom = {} if log is None else (await client.log_metadata(log)).custom
        closed = [one for one in await metadata_of(client, log, ledger_ids) if one.is_closed]
        for metadata in closed:
            if metadata.first_entry > 0:
                raise InvalidArgumentError(
                    f"ledger {metadata.ledger_id} has been trimmed, and begins at entry "
                    f"{metadata.first_entry}: an export holds whole ledgers"
                )
        for metadata in closed[:1]:
            await unlock(client, metadata, place)
        manifest = {
            "format": FORMAT_VERSION,
            "id": uuid.uuid4().hex,
            "log": log,
            "exported_ms": client._context.now_ms(),
            "custom": {key: base64.b64encode(value).decode() for key, value in custom.items()},
            "ledgers": [_describe(metadata) for metadata in closed],
        }
        return manifest, [metadata.ledger_id for metadata in closed]


def _describe(metadata: LedgerMetadata) -> dict[str, Any]:
    assert metadata.last_entry is not None
    return {
        "ledger_id": metadata.ledger_id,
        "created_ms": metadata.created_ms,
        "entries": metadata.last_entry + 1,
        "bytes": metadata.length,
        "digest": metadata.digest,
        "quorums": [metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum],
        "custom": {key: base64.b64encode(value).decode() for key, value in metadata.custom.items()},
        "fingerprint": 0,
    }


def _read_manifest(spark: SparkSession, folder: str) -> dict[str, Any]:
    """Read an export's manifest, and check all that an import takes from it.

    Raises:
        InvalidArgumentError: there is none, or it is damaged, or of another version.
    """
    try:
        lines = [row.value for row in spark.read.text(f"{folder}/manifest").collect()]
    except Exception as error:  # any error: pyspark raises several kinds for files that cannot be read
        raise InvalidArgumentError(f"{folder} holds no export: {_reason(error)}") from None
    try:
        (line,) = lines
        manifest: dict[str, Any] = json.loads(line)
        version = manifest["format"]
        if version != FORMAT_VERSION:
            raise InvalidArgumentError(
                f"{folder} has format {version!r}; this release reads {FORMAT_VERSION}"
            )
        check_custom(_custom_of(manifest))
        if not isinstance(manifest["id"], str) or not 1 <= len(manifest["id"]) <= 100:
            raise ValueError(f"its id is {manifest['id']!r}")
        for ledger in manifest["ledgers"]:
            check_ledger_id(ledger["ledger_id"])
            check_quorums(*ledger["quorums"])
            check_custom(_custom_of(ledger))
            if not all(isinstance(ledger[key], int) for key in ("entries", "bytes", "fingerprint")):
                raise ValueError(f"ledger {ledger['ledger_id']} has no entries, bytes or fingerprint")
    except InvalidArgumentError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidArgumentError(
            f"the manifest of the export in {folder} is damaged ({error!r}): copy the folder anew, or export "
            "again"
        ) from None
    return manifest


def _custom_of(described: dict[str, Any]) -> dict[str, bytes]:
    """Return the custom metadata of a log or a ledger as the manifest describes it."""
    return {key: base64.b64decode(value) for key, value in described["custom"].items()}


def _read_entries(spark: SparkSession, folder: str, ledgers: Mapping[int, dict[str, Any]]) -> DataFrame:
    """Return the entries of an export, once they are those that its manifest describes.

    Raises:
        InvalidArgumentError: they cannot be read, or differ.
    """
    try:
        entries = spark.read.parquet(f"{folder}/entries").select("ledger_id", "entry_id", "value")
        found = _fingerprints(entries)
    except Exception as error:  # as in `_read_manifest`
        raise InvalidArgumentError(
            f"the entries of the export in {folder} cannot be read: {_reason(error)}"
        ) from None
    for old in [*ledgers, *(each for each in found if each not in ledgers)]:
        said = _told(ledgers[old]) if old in ledgers else (0, 0, 0)
        count, size, _ = seen = found.get(old, (0, 0, 0))
        if seen != said:
            raise InvalidArgumentError(
                f"the export in {folder} is damaged: ledger {old} has {count} entries of {size} bytes there, "
                f"and differs from what the manifest says, {said[0]} of {said[1]}: copy the folder anew, or "
                "export again"
            )
    return entries


def _told(ledger: dict[str, Any]) -> tuple[int, int, int]:
    """Return what the manifest tells of a ledger's entries, as `_fingerprints` does."""
    return ledger["entries"], ledger["bytes"], ledger["fingerprint"]


def _reason(error: Exception) -> str:
    """Return the line of an error of Spark's that names its innermost cause; without one the first line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return (causes or lines or [repr(error)])[0 if not causes else -1]


def _check_protection(ledgers: dict[int, dict[str, Any]], place: PasswordPlace) -> None:
    locked = [old for old, ledger in ledgers.items() if ledger.get("digest") == DIGEST_HMAC]
    if locked and not password_of(place):
        raise InvalidArgumentError(
            f"{len(locked)} of the ledgers exported had a password, ledger {locked[0]} the first: name the "
            "one that the new ledgers get by passwordFile or passwordEnv"
        )


async def _check_log(
    uri: str, log: str, custom: dict[str, bytes], place: PasswordPlace, job: str | None
) -> None:
    """Check before anything is written that the export fits the log, if there is one.

    Args:
        job: the job of this export, which may not have added to the log before; None: it may.
    """
    async with client_aio.connect(uri) as client:
        with contextlib.suppress(NoSuchLogError):
            metadata = await client.log_metadata(log)
            provenance.check_fit(custom, metadata.custom, is_used=bool(metadata.rows))
            if job is not None:
                # A log forgets the transactions of long ago; its ledgers bear their job's name.
                found = await metadata_of(client, log, None)
                jobs = {one.custom.get(provenance.JOB, b"") for one in found}
                if job in metadata.transactions or job.encode() in jobs:
                    raise _imported_before(log)
            await unlock_log(client, metadata, place)


def _settings(log: str, job: str, ledger: dict[str, Any], password: bytes) -> dict[str, Any]:
    ensemble_size, write_quorum, ack_quorum = ledger["quorums"]
    custom = _custom_of(ledger)
    # Without the tags of the old ledger's log and job: a sweep would delete the new ledger as left over.
    custom = {key: value for key, value in custom.items() if key not in _NOT_IMPORTED}
    return {
        "ensemble_size": ensemble_size,
        "write_quorum": write_quorum,
        "ack_quorum": ack_quorum,
        "digest": DIGEST_HMAC if password else DIGEST_CRC,
        "password": password,
        "custom_metadata": {**custom, provenance.LOG: log.encode(), provenance.JOB: job.encode()},
    }


def _importer(
    uri: str, log: str, job: str, ledgers: dict[int, dict[str, Any]], place: PasswordPlace
) -> Callable[[Iterable[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """Return the function that writes each ledger's entries, sorted by entry id, to a new ledger."""

    def run(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        from client_aio.spark.schemas import arrow_schema_of_ddl

        with client_aio.sync.connect(uri) as client:
            password = password_of(place)
            settings = {old: _settings(log, job, ledger, password) for old, ledger in ledgers.items()}
            task = _Import(client, settings)
            for batch in batches:
                olds, entry_ids, values = (column.to_pylist() for column in batch.columns)
                first = 0
                for old, run in itertools.groupby(olds):
                    end = first + sum(1 for _ in run)
                    task.take(old, entry_ids[first:end], values[first:end])
                    first = end
            task.finish()
        made = [{"old": old, "ledger_id": new} for old, new in task.made.items()]
        yield pyarrow.RecordBatch.from_pylist(made, schema=arrow_schema_of_ddl(_IMPORTED))

    return run


class _Import:
    """One task of an import: writes the entries of one ledger after another."""

    def __init__(self, client: client_aio.sync.Client, settings: dict[int, dict[str, Any]]) -> None:
        self._client = client
        self._settings = settings
        self._writer: client_aio.sync.LedgerWriter | None = None
        self._following = 0
        self.made: dict[int, int] = {}

    def take(self, old: int, entry_ids: list[int], values: list[bytes]) -> None:
        """Add entries to the new ledger for the exported ledger `old`; its close tells of a failure."""
        if old not in self.made:
            self.finish()
            self._writer = self._client.create_ledger(**self._settings[old])
            self._following, self.made[old] = 0, self._writer.ledger_id
        for following, entry_id in enumerate(entry_ids, self._following):
            if entry_id != following:
                raise BookKeeperError(
                    f"entry {following} of exported ledger {old} is missing: {entry_id} follows",
                    ledger_id=old,
                    entry_id=following,
                )
        assert self._writer is not None
        self._writer.add_batch_nowait(values)
        self._following += len(values)

    def finish(self) -> None:
        """Close the ledger that is being written, if there is one."""
        if self._writer is not None:
            self._writer.close()


async def _make_empty(uri: str, settings: dict[str, Any]) -> int:
    async with client_aio.connect(uri) as client, client.create_ledger(**settings) as ledger:
        return ledger.ledger_id


def _imported_before(log: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"log {log!r} has the ledgers of this export already: its rows would be there twice. To add them "
        "once more, set again (--again)"
    )


async def _add(
    uri: str, log: str, ids: list[int], custom: dict[str, bytes], password: bytes, job: str | None
) -> None:
    async with client_aio.connect(uri) as client:
        transaction = None if job is None else (job, 0)
        addition = Addition.check(ids, transaction, False, check_custom(custom))
        addition = replace(addition, fits=fit_check(custom))
        added = await add_to_log(client._context, client._lists(log), addition, password)
        if added.repeated:  # by another import at the same time
            for ledger_id in ids:
                with contextlib.suppress(BookKeeperError):
                    await client.delete_ledger(ledger_id, password=password)
            raise _imported_before(log)
