"""Rows as JSON and back, by the Arrow types of their columns. Pure.

Types that JSON has stay as they are: numbers, strings, true and false, null, lists; a struct is an object.
Other types are strings: ISO 8601 dates and times, Base64 for bytes, decimals, and durations in microseconds.
As in Spark's to_json, NaN, Infinity and -Infinity are strings too, since JSON has no such numbers. A map is a
list of [key, value], since its keys need not be strings.

Columns of plain types are converted to text, and back, as a whole. Other cells are converted one by one, to
the same text.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute as compute
import pyarrow.types as kinds

from metadata.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

_encode_flat = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=("\0", ":")).encode
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NEEDS_ESCAPE = r'["\\\x00-\x1f]'


def to_json_rows(batch: pyarrow.RecordBatch) -> list[bytes]:
    """Return each row of a batch as an object, in UTF-8.

    Raises:
        InvalidArgumentError: a date or time that Python cannot represent; the error names the column.
    """
    if not batch.num_rows:
        return []
    parts: list[Any] = []
    for number, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        try:
            texts = _texts(column)
        except OverflowError as error:
            raise InvalidArgumentError(
                f"column {name!r} has a date or a time that cannot be written as JSON ({error}): there, "
                "those are of the years 1 to 9999, in UTC. Write with the encoding arrow"
            ) from error
        parts += [("{" if not number else ",") + _encode(name) + ":", texts]
    joined = compute.binary_join_element_wise(*parts, "}", "")
    rows: list[bytes] = joined.cast(pyarrow.binary()).to_numpy(zero_copy_only=False).tolist()
    return rows


def _texts(column: pyarrow.Array) -> pyarrow.Array:
    """Return the cells of a column as JSON."""
    kind = column.type
    if kinds.is_integer(kind) or kinds.is_boolean(kind):
        return column.cast(pyarrow.string()).fill_null("null")
    if kinds.is_string(kind) and not _needs_escape(column):
        return compute.binary_join_element_wise('"', column, '"', "").fill_null("null")
    values = [to_json_value(cell, kind) for cell in column.to_pylist()]
    # One call for all cells where possible. No JSON has a zero byte, since strings escape it.
    is_flat = not kinds.is_nested(kind)
    texts = _encode_flat(values)[1:-1].split("\0") if is_flat else list(map(_encode, values))
    return pyarrow.array(texts, pyarrow.string())


def _needs_escape(column: pyarrow.Array) -> bool:
    found: bool = compute.any(compute.match_substring_regex(column, _NEEDS_ESCAPE)).as_py()
    return found


def from_json_rows(schema: pyarrow.Schema, entries: Sequence[bytes]) -> list[pyarrow.Array] | None:
    """Return the columns of rows; None where a row does not fit, or may not fit, the schema.

    After None the caller decodes row by row, to find the row that does not fit.
    """
    decode = json.JSONDecoder().decode
    try:
        documents = [decode(entry.decode()) for entry in entries]
        if not all(type(document) is dict for document in documents):
            return None
        return [
            pyarrow.array(
                _cells([document.get(field.name) for document in documents], field.type), field.type
            )
            for field in schema
        ]
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return None


def _cells(values: list[Any], kind: pyarrow.DataType) -> list[Any]:
    """Return the cells of a column; types that JSON has itself are not converted cell by cell."""
    found = set(map(type, values)) - {type(None)}
    if (
        (kinds.is_string(kind) and found <= {str})
        or (kinds.is_integer(kind) and found <= {int})  # Arrow checks the range
        or (kinds.is_floating(kind) and found <= {float})
        or (kinds.is_boolean(kind) and found <= {bool})
    ):
        return values
    return [from_json_value(value, kind) for value in values]


def to_json_value(cell: Any, kind: pyarrow.DataType) -> Any:
    """Return a cell as a value that `json` can write."""
    if cell is None or kinds.is_integer(kind) or kinds.is_string(kind):
        return cell
    if kinds.is_floating(kind):
        return cell if math.isfinite(cell) else _name_of(cell)
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return base64.b64encode(cell).decode()
    if kinds.is_timestamp(kind):
        if cell.tzinfo is not None:
            cell = cell.astimezone(datetime.UTC)
        return cell.isoformat()
    if kinds.is_date(kind) or kinds.is_time(kind):
        return cell.isoformat()
    if kinds.is_duration(kind):
        return cell // datetime.timedelta(microseconds=1)
    if kinds.is_decimal(kind):
        return str(cell)
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return [to_json_value(item, kind.value_type) for item in cell]
    if kinds.is_struct(kind):
        return {part.name: to_json_value(cell[part.name], part.type) for part in kind}
    if kinds.is_map(kind):
        return [[to_json_value(k, kind.key_type), to_json_value(v, kind.item_type)] for k, v in cell]
    return cell


def from_json_value(value: Any, kind: pyarrow.DataType) -> Any:
    """Invert `to_json_value`.

    Raises:
        ValueError, TypeError, ArithmeticError: the value is not of that type.
    """
    if value is None:
        return None
    if kinds.is_boolean(kind):
        return _check_type(value, bool, kind)
    if kinds.is_integer(kind):
        return _integer(value, kind)
    if kinds.is_floating(kind):
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if isinstance(value, bool):
            raise TypeError(f"{value!r} is no {kind}")
        return float(_check_type(value, (int, float), kind))
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return _check_type(value, str, kind)
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return base64.b64decode(_check_type(value, str, kind), validate=True)
    if kinds.is_timestamp(kind):
        return _timestamp(_check_type(value, str, kind), kind)
    if kinds.is_date(kind):
        return datetime.date.fromisoformat(_check_type(value, str, kind))
    if kinds.is_time(kind):
        return datetime.time.fromisoformat(_check_type(value, str, kind))
    if kinds.is_duration(kind):
        return datetime.timedelta(microseconds=_check_type(value, int, kind))
    if kinds.is_decimal(kind):
        return _decimal(_check_type(value, str, kind), kind)
    return _nested(value, kind)


def _nested(value: Any, kind: pyarrow.DataType) -> Any:
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return [from_json_value(item, kind.value_type) for item in _check_type(value, list, kind)]
    if kinds.is_struct(kind):
        document = _check_type(value, dict, kind)
        return {part.name: from_json_value(document.get(part.name), part.type) for part in kind}
    if kinds.is_map(kind):
        pairs = _check_type(value, list, kind)
        return [(from_json_value(k, kind.key_type), from_json_value(v, kind.item_type)) for k, v in pairs]
    return value


def _check_type(value: Any, wanted: type | tuple[type, ...], kind: pyarrow.DataType) -> Any:
    if not isinstance(value, wanted):
        raise TypeError(f"{value!r:.80} is no {kind}")
    return value


def _integer(value: Any, kind: pyarrow.DataType) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r:.80} is no {kind}")
    half = 1 << (kind.bit_width - 1)
    if not -half <= value < half:
        raise ValueError(f"{value} is out of the range of {kind}")
    return value


def _name_of(number: float) -> str:
    """Return the text of a number that JSON does not have: NaN or an infinity."""
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def _decimal(text: str, kind: pyarrow.DataType) -> decimal.Decimal:
    given = decimal.Decimal(text)
    if not given.is_finite():
        raise ValueError(f"{text} is no {kind}")
    with decimal.localcontext() as context:
        context.prec = 76
        number = given.quantize(decimal.Decimal(1).scaleb(-kind.scale))
    if number.adjusted() + 1 > kind.precision - kind.scale and number:
        raise ValueError(f"{text} is out of the range of {kind}")
    if number != given:
        raise ValueError(f"{text} has more digits behind the point than {kind}")
    return number


def _timestamp(text: str, kind: pyarrow.DataType) -> datetime.datetime:
    moment = datetime.datetime.fromisoformat(text)
    if kind.tz is None:
        if moment.tzinfo is not None:
            raise ValueError(f"{text} has a zone, and the column has none")
        return moment
    return moment.replace(tzinfo=datetime.UTC) if moment.tzinfo is None else moment
