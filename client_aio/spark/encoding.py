"""Rows to entries and back: the encodings binary, json and arrow, and compression.

Pure: bytes and Arrow arrays in, bytes and Arrow arrays out.

- `binary`: a column of bytes; each row is an entry, as it is.
- `json`: each row is an entry, a JSON object in UTF-8. Dates and times are ISO 8601 (UTC where they have a
  zone), bytes are Base64, decimals are strings, maps are lists of [key, value].
- `arrow`: each batch of rows is an entry: an encapsulated record-batch message of Arrow's IPC format. The
  message has no schema; the log and the ledger keep it.

A compressed entry is four bytes, the length before compression (little-endian), and the compressed bytes: a
zstd frame or an lz4 frame. Each ledger's custom metadata name its own encoding and compression, so that a log
may hold ledgers of several kinds.

Invariant: decoding inverts encoding, for every schema that Spark can write. An error names the entry that
cannot be decoded.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy
import pyarrow
import pyarrow.ipc

from client_aio.spark.json_rows import from_json_rows, from_json_value, to_json_rows
from metadata.errors import BookKeeperError, EntryTooLargeError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_LENGTH = struct.Struct("<I")
_CODECS = {"zstd": "zstd", "lz4": "lz4"}
_INFLATED_BYTES_MAX = 256 * 1024 * 1024
_RUN_BYTES = 64 * 1024 * 1024
"""The bytes of entries that are decompressed together: they have to fit into memory, and into one array."""


class UndecodableEntryError(BookKeeperError):
    """An entry's bytes do not fit its ledger's encoding. They are intact, and were written so."""


@dataclass(frozen=True, slots=True)
class Format:
    """The encoding of one ledger's entries. `schema` is Arrow's, of the decoded columns."""

    encoding: str
    compression: str = "none"
    schema: pyarrow.Schema | None = None


@dataclass(slots=True)
class Decoded:
    """The rows of a run of entries.

    `counts` has each entry's number of rows, None where that is one each. `errors` maps the place of an
    undecodable entry in the run to the reason; its row is null.
    """

    columns: list[pyarrow.Array]
    rows: int
    counts: numpy.ndarray[Any, numpy.dtype[numpy.int64]] | None = None
    errors: dict[int, str] = field(default_factory=dict)


# --- encoding ---


def make_encoder(
    format_: Format, *, entry_bytes: int, entry_bytes_max: int, value: str | None = None
) -> Callable[[pyarrow.RecordBatch], list[bytes]]:
    """Return the function that turns a batch of rows into entries.

    Args:
        entry_bytes: the size at which a batch of rows is cut (arrow), before compression.
        entry_bytes_max: the largest entry that the client takes.
        value: the column of bytes (binary).

    The function raises InvalidArgumentError for a null without an encoding, or a string that is not UTF-8. It
    raises EntryTooLargeError for a row above the limit. Both errors name the row within the batch.
    """
    compress = _compressor(format_.compression)
    if format_.compression != "none":  # what cannot be compressed grows a little
        entry_bytes = min(entry_bytes, entry_bytes_max - entry_bytes_max // 64 - 1024)

    def finish(batch: pyarrow.RecordBatch, entries: list[bytes], rows: Sequence[int]) -> list[bytes]:
        """Compress, and check the sizes; `rows` has the row in the batch that each entry begins with."""
        if format_.compression != "none":
            for row, entry in zip(rows, entries, strict=True):
                if len(entry) > _INFLATED_BYTES_MAX:
                    raise _too_large(batch, row, len(entry), _INFLATED_BYTES_MAX, " before compression")
            entries = compress(entries)
        for row, entry in zip(rows, entries, strict=True):
            if len(entry) > entry_bytes_max:
                raise _too_large(batch, row, len(entry), entry_bytes_max, "")
        return entries

    def binary(batch: pyarrow.RecordBatch) -> list[bytes]:
        assert value is not None
        column = batch.column(batch.schema.get_field_index(value))
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise InvalidArgumentError(
                f"row {row} of a batch has a null in column {value!r}: an entry is bytes. "
                f"Leave such rows out: where({value} is not null)"
            )
        entries: list[bytes] = column.to_numpy(zero_copy_only=False).tolist()
        return finish(batch, entries, range(len(entries)))

    def rows(batch: pyarrow.RecordBatch) -> list[bytes]:
        check_readable(batch)
        return finish(batch, to_json_rows(batch), range(batch.num_rows))

    def arrow(batch: pyarrow.RecordBatch) -> list[bytes]:
        assert format_.schema is not None
        check_readable(batch)
        if batch.schema != format_.schema:
            batch = batch.cast(format_.schema)
        cut = list(_messages(batch, entry_bytes))
        return finish(batch, [message for _, message in cut], [row for row, _ in cut])

    return {"binary": binary, "json": rows, "arrow": arrow}[format_.encoding]


def _too_large(batch: pyarrow.RecordBatch, row: int, size: int, limit: int, when: str) -> EntryTooLargeError:
    """Return the error for a row above a limit, with the column that holds the most of it."""
    cells = batch.slice(row, 1)
    sizes = {name: column.nbytes for name, column in zip(cells.schema.names, cells.columns, strict=True)}
    largest = max(sizes, key=lambda name: sizes[name])
    return EntryTooLargeError(
        f"row {row} of a batch of rows makes an entry of {size:,} bytes{when}, most of it in column "
        f"{largest!r}, and the limit is {limit:,}: leave such rows out, or cut the column into several rows"
    )


def check_readable(batch: pyarrow.RecordBatch) -> None:
    """Raise InvalidArgumentError for a string that is not UTF-8: no read could decode it.

    A cast from bytes makes such strings.
    """
    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        raise InvalidArgumentError(
            f"a batch of rows cannot be written: {error}. A string must be UTF-8; other bytes go into a "
            "column of the type binary"
        ) from error


def _messages(batch: pyarrow.RecordBatch, entry_bytes: int, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Cut a batch, which begins with row `first`, into messages of about the size wanted, with their rows.

    A message has one row at least.
    """
    if not batch.num_rows:
        return
    size = pyarrow.ipc.get_record_batch_size(batch)
    if size <= entry_bytes or batch.num_rows == 1:
        yield first, batch.serialize().to_pybytes()
        return
    rows = max(1, min(batch.num_rows // 2, batch.num_rows * entry_bytes // size))
    for start in range(0, batch.num_rows, rows):
        yield from _messages(batch.slice(start, rows), entry_bytes, first + start)


def _compressor(compression: str) -> Callable[[list[bytes]], list[bytes]]:
    if compression == "none":
        return lambda entries: entries
    codec = pyarrow.Codec(_CODECS[compression])
    return lambda entries: [
        _LENGTH.pack(len(entry)) + codec.compress(entry, asbytes=True) for entry in entries
    ]


# --- decoding ---


def cut_into_runs(format_: Format, offsets: Sequence[int], buffer: memoryview) -> list[tuple[int, int]]:
    """Cut a run of entries into runs that can be decoded in one piece: the places of the first and the last.

    Entries that compress a thousandfold are small together, and would fill the memory at once. A run has more
    than `_RUN_BYTES` only where it is one entry.
    """
    count = len(offsets) - 1
    if format_.compression == "none":
        return [(0, count - 1)]
    runs, first, size = [], 0, 0
    for place, (start, end) in enumerate(pairwise(offsets)):
        inflated = _LENGTH.unpack_from(buffer, start)[0] if end - start >= _LENGTH.size else 0
        if inflated > _INFLATED_BYTES_MAX:
            inflated = 0  # It is not decompressed.
        if size + inflated > _RUN_BYTES and place > first:
            runs.append((first, place - 1))
            first, size = place, 0
        size += inflated
    runs.append((first, count - 1))
    return runs


def decode(
    format_: Format, offsets: Sequence[int], buffer: memoryview, *, is_permissive: bool = False
) -> Decoded:
    """Turn a run of entries into rows: one column `value` (binary), or the columns of the format's schema.

    Args:
        offsets: entry i is `buffer[offsets[i]:offsets[i + 1]]`.
        is_permissive: return a row of nulls, and a reason, for an entry that cannot be decoded.

    Raises:
        UndecodableEntryError: an entry cannot be decoded, and `is_permissive` is false; `entry_id` is its
            place in the run.
    """
    errors: dict[int, str] = {}

    def fail(place: int, error: object) -> None:
        if not is_permissive:
            raise UndecodableEntryError(
                f"it cannot be decoded as {format_.encoding}"
                f"{'' if format_.compression == 'none' else ' with ' + format_.compression}: {error}",
                entry_id=place,
            )
        errors[place] = str(error)

    if format_.compression != "none":
        entries = _decompressed(format_.compression, offsets, buffer, fail)
        offsets = list(accumulate(map(len, entries), initial=0))
        buffer = memoryview(b"".join(entries))
    if format_.encoding == "binary":
        return _as_values(offsets, buffer, errors)
    assert format_.schema is not None
    if format_.encoding == "json":
        return _from_json(format_.schema, offsets, buffer, errors, fail)
    return _from_arrow(format_.schema, offsets, buffer, errors, fail)


def binary_array(
    offsets: Sequence[int], buffer: memoryview, nulls: dict[int, str] | None = None
) -> pyarrow.Array:
    """View a run of entries as an Arrow array of bytes, without an object per entry."""
    count = len(offsets) - 1
    places = pyarrow.py_buffer(numpy.asarray(offsets, dtype=numpy.int32))
    validity = None
    if nulls:
        is_valid = numpy.ones(count, dtype=bool)
        is_valid[list(nulls)] = False
        validity = pyarrow.array(is_valid).buffers()[1]
    return pyarrow.Array.from_buffers(pyarrow.binary(), count, [validity, places, pyarrow.py_buffer(buffer)])


def _as_values(offsets: Sequence[int], buffer: memoryview, errors: dict[int, str]) -> Decoded:
    return Decoded([binary_array(offsets, buffer, errors)], len(offsets) - 1, errors=errors)


def _decompressed(
    compression: str, offsets: Sequence[int], buffer: memoryview, fail: Callable[[int, object], None]
) -> list[bytes]:
    codec = pyarrow.Codec(_CODECS[compression])
    entries = []
    for place, (start, end) in enumerate(pairwise(offsets)):
        try:
            (size,) = _LENGTH.unpack_from(buffer[start:end])
            if size > _INFLATED_BYTES_MAX:
                raise ValueError(f"it claims {size:,} bytes")
            entry = codec.decompress(buffer[start + _LENGTH.size : end], size, asbytes=True)
            if len(entry) != size:
                raise ValueError(f"it has {len(entry)} bytes and claims {size}")
        except (OSError, ValueError, struct.error) as error:
            fail(place, error)
            entry = b""
        entries.append(entry)
    return entries


def _from_arrow(
    schema: pyarrow.Schema,
    offsets: Sequence[int],
    buffer: memoryview,
    errors: dict[int, str],
    fail: Callable[[int, object], None],
) -> Decoded:
    batches, counts = [], []
    for place, (start, end) in enumerate(pairwise(offsets)):
        batch = None
        if place not in errors:
            try:
                message = pyarrow.py_buffer(buffer[start:end])
                batch = pyarrow.ipc.read_record_batch(message, schema)
                for column in batch.columns:
                    column.validate(full=True)
            except (OSError, ValueError, IndexError, EOFError) as error:
                batch = None
                fail(place, error)
        if batch is None:
            batch = pyarrow.RecordBatch.from_pylist([{}], schema=schema)
        batches.append(batch)
        counts.append(batch.num_rows)
    columns = [
        pyarrow.concat_arrays([batch.column(index) for batch in batches])
        if batches
        else pyarrow.array([], kind)
        for index, kind in enumerate(schema.types)
    ]
    return Decoded(columns, sum(counts), numpy.asarray(counts, dtype=numpy.int64), errors)


def _cell(value: Any, kind: pyarrow.DataType) -> Any:
    """Return a value of JSON as a cell; raises as `from_json_value`, and for a cell that Arrow refuses."""
    cell = from_json_value(value, kind)
    if cell is not None:
        pyarrow.scalar(cell, kind)
    return cell


def _from_json(
    schema: pyarrow.Schema,
    offsets: Sequence[int],
    buffer: memoryview,
    errors: dict[int, str],
    fail: Callable[[int, object], None],
) -> Decoded:
    if not errors:
        whole = bytes(buffer)
        arrays = from_json_rows(schema, [whole[start:end] for start, end in pairwise(offsets)])
        if arrays is not None:
            return Decoded(arrays, len(offsets) - 1)
    columns: list[list[Any]] = [[] for _ in schema]
    fields = list(zip(schema.names, schema.types, columns, strict=True))
    for place, (start, end) in enumerate(pairwise(offsets)):
        row: list[Any] = [None] * len(fields)
        if place not in errors:
            try:
                document = json.loads(bytes(buffer[start:end]))
                if not isinstance(document, dict):
                    raise ValueError(f"it is {type(document).__name__}, not an object")
                row = [_cell(document.get(name), kind) for name, kind, _ in fields]
            except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
                fail(place, error)
        for cell, (_, _, column) in zip(row, fields, strict=True):
            column.append(cell)
    arrays = [pyarrow.array(column, kind) for _, kind, column in fields]
    return Decoded(arrays, len(offsets) - 1, errors=errors)
