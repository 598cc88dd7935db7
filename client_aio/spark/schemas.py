"""The columns of a read and their types: Spark's and Arrow's.

A read has either the raw columns, or the columns that the entries decode to; `columns` chooses among both.
Columns of origin (`OWN`) say where a row comes from. A decoded column replaces a column of origin of the same
name, except that `_error` is always this package's.
"""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema as _to_arrow_schema
from pyspark.sql.types import StructType

from client_aio.spark.provenance import Written, as_nullable, as_types, misfits
from metadata.errors import InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow

    from client_aio.spark.options import ReadOptions

VALUE = "value"
ERROR = "_error"
OWN = {
    "log": "string",
    "ledger_id": "long",
    "entry_id": "long",
    "position": "string",
    "timestamp": "timestamp",
}
"""The columns of origin, which say where a row comes from; `timestamp` is when its ledger was created."""
BYTES = '{"type":"struct","fields":[{"name":"value","type":"binary","nullable":true,"metadata":{}}]}'
"""The schema that entries decode to with the encoding binary."""


def schema_of(options: ReadOptions, written: Written) -> StructType:
    """Return the schema of a read.

    Raises:
        InvalidArgumentError: an unknown column is asked for, or the columns of JSON are not known.
    """
    check_columns(options)
    decoded = _decoded_fields(written)
    names = options.columns or ([*OWN, VALUE] if written.encoding == "binary" else [*decoded])
    known = {name: _field(name, kind) for name, kind in OWN.items()} | decoded
    unknown = [name for name in names if name not in known and name != ERROR]
    if unknown:
        raise InvalidArgumentError(
            f"the option columns names {', '.join(map(repr, unknown))}; there are: {', '.join(known)}"
        )
    chosen = [known[name] for name in names if name != ERROR]
    if options.mode == "permissive":
        chosen.append(_field(ERROR, "string"))
    return StructType.fromJson({"type": "struct", "fields": chosen})


def check_columns(options: ReadOptions, schema: StructType | None = None) -> None:
    """Check that the option `columns` fits the other options.

    Args:
        schema: the columns of the read, perhaps as the user wrote them.

    Raises:
        InvalidArgumentError: the option `columns` does not fit.
    """
    wanted = [name for name in options.columns if name != ERROR]
    if ERROR in options.columns and options.mode != "permissive":
        raise InvalidArgumentError(
            f"the option columns names {ERROR!r}, which there is with mode permissive only: set that, or "
            "leave it out"
        )
    if schema is None or not options.columns:
        return
    found = [name for name in schema.names if name != ERROR]
    if found != wanted:
        raise InvalidArgumentError(
            f"the option columns names {', '.join(wanted)}; the schema that is given has "
            f"{', '.join(found)}: leave the option out, and give a schema of the columns that you want"
        )


def check_types(schema: StructType) -> None:
    """Raise InvalidArgumentError for a column of a type that Arrow does not have."""
    for field in schema.fields:
        try:
            arrow_schema(StructType([field]))
        except PySparkException as error:
            raise InvalidArgumentError(
                f"column {field.name!r} is {field.dataType.simpleString()}, a type that cannot be read or "
                f"written: {error}"
            ) from error


def check_declared(options: ReadOptions, schema: StructType, written: Written) -> None:
    """Check in the driver that a schema, which the user may have declared, fits what is to be read.

    A permissive read is not checked: there, entries that do not fit become rows with the reason.

    Raises:
        InvalidArgumentError: a column is unknown, or has another type; or Arrow has no such type.
    """
    check_types(schema)
    if options.mode == "permissive" or (written.encoding != "binary" and written.schema is None):
        return
    decoded = _decoded_fields(written)
    known = {name: _field(name, kind) for name, kind in OWN.items()} | decoded
    said = misfits(schema.json(), json.dumps({"type": "struct", "fields": list(known.values())}))
    if said:
        what = f"log {options.log[0]!r}" if len(options.log) == 1 else "what is to be read"
        hint = ""
        if written.encoding == "binary" and options.encoding == "auto":
            hint = ", or set the option encoding to json if the entries are JSON"
        raise InvalidArgumentError(
            f"the schema of the read does not fit {what}: {'; '.join(said)}. There are: {', '.join(known)}. "
            f"Declare those columns with their types, or no schema{hint}. A frame that was loaded while the "
            "log had other columns: load it again"
        )


def _decoded_fields(written: Written) -> dict[str, dict[str, Any]]:
    if written.encoding == "binary":
        return {VALUE: _field(VALUE, "binary")}
    if written.schema is None:
        raise InvalidArgumentError(
            f"entries are {written.encoding}, and nothing says which columns they have: give them with "
            '.schema("a long, b string"), or read the bytes with .option("encoding", "binary")'
        )
    return {field["name"]: field for field in json.loads(as_nullable(written.schema))["fields"]}


def _field(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


def arrow_schema(schema: StructType | str) -> pyarrow.Schema:
    """Return the Arrow schema under which Spark exchanges rows of a schema (or of its JSON)."""
    # Without metadata, which Arrow would carry along; a collation is Spark's own affair.
    text = schema if isinstance(schema, str) else schema.json()
    schema = StructType.fromJson(json.loads(as_types(text)))
    convert: Any = _to_arrow_schema  # Any, since its parameters differ between releases of pyspark
    in_utc = {"timezone": "UTC"} if "timezone" in inspect.signature(convert).parameters else {}
    converted: pyarrow.Schema = convert(schema, **in_utc)
    return converted


def arrow_schema_of_ddl(ddl: str) -> pyarrow.Schema:
    """Return the Arrow schema of columns of plain types, written as `name type, name type`."""
    fields = [_field(*column.split()) for column in ddl.split(",")]
    return arrow_schema(StructType.fromJson({"type": "struct", "fields": fields}))


def nullable_json(schema: StructType) -> str:
    """Return a schema as the JSON that the tags keep, with every part nullable."""
    return as_nullable(schema.json())


def without_error(schema: StructType) -> StructType:
    """Return the columns that entries decode to, from a schema that the user wrote."""
    return StructType([field for field in schema.fields if field.name != ERROR])


def from_entries(schema: StructType, decoded: str) -> StructType:
    """Return the columns of a read that come from the entries: all but the columns of origin.

    Args:
        decoded: the schema that the query decodes to, in Spark's JSON.
    """
    names = {field["name"] for field in json.loads(decoded)["fields"]}
    fields = without_error(schema).fields
    return StructType([field for field in fields if field.name in names or field.name not in OWN])


def is_binary(schema: StructType, name: str) -> bool:
    """Return whether a column is of bytes."""
    return schema[name].dataType.typeName() == "binary"
