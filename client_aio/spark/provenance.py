"""The tags of this package in the custom metadata of ledgers and logs. Pure.

Owns the keys. A ledger's tags name its encoding, and the log and job that wrote it: orphans of a dead job are
recognised by them. A log's tags name the encoding of the whole log.

    spark.encoding      binary, json or arrow
    spark.compression   zstd or lz4; missing for none
    spark.schema        Spark's JSON of the schema (json, arrow), deflated
    spark.log           of a ledger: the log that it is to be added to
    spark.job           of a ledger: the job that wrote it, a batch job's id or a streaming query's
    spark.batch         of a ledger: the number of the query's micro-batch
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from client_aio.log.add_ledgers import JOBS_LOG
from client_aio.spark.options import COMPRESSIONS, ENCODINGS
from metadata.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

ENCODING = "spark.encoding"
COMPRESSION = "spark.compression"
SCHEMA = "spark.schema"
LOG = JOBS_LOG
JOB = "spark.job"
BATCH = "spark.batch"

_SCHEMA_BYTES_MAX = 4 * 1024 * 1024
_CUSTOM_BYTES_MAX = 60 * 1024


@dataclass(frozen=True, slots=True)
class Written:
    """The encoding of a ledger, or of a whole log. `schema` is Spark's JSON; None: columns are not known."""

    encoding: str = "binary"
    compression: str = "none"
    schema: str | None = None

    def to_custom(self) -> dict[str, bytes]:
        """Return the entries of the custom metadata.

        Raises:
            InvalidArgumentError: the schema is too large for the custom metadata.
        """
        custom = {ENCODING: self.encoding.encode()}
        if self.compression != "none":
            custom[COMPRESSION] = self.compression.encode()
        if self.schema is not None:
            custom[SCHEMA] = zlib.compress(self.schema.encode(), 9)
            if len(custom[SCHEMA]) > _CUSTOM_BYTES_MAX:
                raise InvalidArgumentError(
                    f"the schema takes {len(custom[SCHEMA]):,} bytes, deflated; a ledger's metadata has room "
                    f"for {_CUSTOM_BYTES_MAX:,}: write fewer columns, or the encoding binary"
                )
        return custom

    @classmethod
    def of_custom(cls, custom: Mapping[str, bytes]) -> Written | None:
        """Parse the tags in custom metadata; None where there is no tag of an encoding.

        Raises:
            InvalidArgumentError: the tags are damaged, or of a later release.
        """
        if ENCODING not in custom:
            return None
        encoding = custom[ENCODING].decode(errors="replace")
        compression = custom.get(COMPRESSION, b"none").decode(errors="replace")
        if encoding not in ENCODINGS or compression not in COMPRESSIONS:
            raise InvalidArgumentError(
                f"its metadata names the encoding {encoding!r} and the compression {compression!r}; this "
                f"release knows {', '.join(ENCODINGS)}, and {', '.join(COMPRESSIONS)}"
            )
        return cls(encoding, compression, _schema_of(custom.get(SCHEMA)))


def _schema_of(stored: bytes | None) -> str | None:
    if stored is None:
        return None
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(stored, _SCHEMA_BYTES_MAX).decode()
        json.loads(text)
    except (zlib.error, ValueError) as error:
        raise InvalidArgumentError(f"the schema in its metadata is damaged: {error}") from error
    return text


def as_nullable(schema: str) -> str:
    """Return the schema (Spark's JSON) with every column, item and value nullable, as file sources do."""
    return json.dumps(_nullable(json.loads(schema)), separators=(",", ":"))


def _nullable(part: Any) -> Any:
    if isinstance(part, list):
        return [_nullable(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: True if key in ("nullable", "containsNull", "valueContainsNull") else _nullable(value)
        for key, value in part.items()
        if key != "metadata"
    } | ({"metadata": {}} if "metadata" in part else {})


def differences(wanted: str, found: str) -> list[str]:
    """List how the columns of a frame differ from those of a log: missing, unknown, of another type."""
    ours, theirs = _columns(wanted), _columns(found)
    missing = [f"column {name!r} is missing" for name in theirs if name not in ours]
    return missing + misfits(wanted, found)


def misfits(wanted: str, found: str) -> list[str]:
    """List the columns that are not in a log, or have another type there."""
    ours, theirs = _columns(wanted), _columns(found)
    said = [f"column {name!r} is not in the log" for name in ours if name not in theirs]
    said += [
        f"column {name!r} is {_text(ours[name])}, in the log {_text(theirs[name])}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]
    return said


def check_fit(wanted: Mapping[str, bytes], found: Mapping[str, bytes], *, is_used: bool) -> None:
    """Check that a log's own tags fit the ledgers to be added to it; both as custom metadata.

    Args:
        is_used: whether the log has ledgers. A log with ledgers and without tags has plain bytes.

    Raises:
        InvalidArgumentError: the log's readers would decode the rows by other columns than they were written
            by.
    """
    ours, theirs = Written.of_custom(wanted) or Written(), Written.of_custom(found)
    if theirs is None and is_used:
        theirs = Written()
    if theirs is None:
        return
    said = [f"encoding {ours.encoding}, in the log {theirs.encoding}"]
    if ours.encoding == theirs.encoding:
        said = [] if ours.schema is None or theirs.schema is None else differences(ours.schema, theirs.schema)
    if said:
        raise InvalidArgumentError(f"what was written does not fit the log as it is now: {'; '.join(said)}")


def _columns(schema: str) -> dict[str, Any]:
    return {column["name"]: column["type"] for column in json.loads(as_nullable(schema))["fields"]}


def _text(kind: Any) -> str:
    return kind if isinstance(kind, str) else json.dumps(kind, separators=(",", ":"))
