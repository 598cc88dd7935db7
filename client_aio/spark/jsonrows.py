"""A cell of a row as JSON and back, by its Arrow type. Pure.

What JSON has itself stays as it is (numbers, strings, true and false, null, lists; a struct is an object).
The rest travels as strings: ISO 8601 dates and times, Base64 for bytes, decimals, and durations in
microseconds. A map is a list of [key, value], since its keys need not be strings.
"""

from __future__ import annotations

import base64
import datetime
import decimal
from typing import Any

import pyarrow
import pyarrow.types as kinds


def to_json_value(cell: Any, kind: pyarrow.DataType) -> Any:
    """Give a cell as a value that `json` can write."""
    if cell is None or kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_string(kind):
        return cell
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
        ValueError, TypeError, ArithmeticError: the value is none of that type.
    """
    if value is None:
        return None
    if kinds.is_boolean(kind):
        return _need(value, bool, kind)
    if kinds.is_integer(kind):
        return _integer(value, kind)
    if kinds.is_floating(kind):
        if isinstance(value, bool):
            raise TypeError(f"{value!r} is no {kind}")
        return float(_need(value, (int, float), kind))
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return _need(value, str, kind)
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return base64.b64decode(_need(value, str, kind), validate=True)
    if kinds.is_timestamp(kind):
        return _timestamp(_need(value, str, kind), kind)
    if kinds.is_date(kind):
        return datetime.date.fromisoformat(_need(value, str, kind))
    if kinds.is_time(kind):
        return datetime.time.fromisoformat(_need(value, str, kind))
    if kinds.is_duration(kind):
        return datetime.timedelta(microseconds=_need(value, int, kind))
    if kinds.is_decimal(kind):
        return _decimal(_need(value, str, kind), kind)
    return _nested(value, kind)


def _nested(value: Any, kind: pyarrow.DataType) -> Any:
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return [from_json_value(item, kind.value_type) for item in _need(value, list, kind)]
    if kinds.is_struct(kind):
        document = _need(value, dict, kind)
        return {part.name: from_json_value(document.get(part.name), part.type) for part in kind}
    if kinds.is_map(kind):
        pairs = _need(value, list, kind)
        return [(from_json_value(k, kind.key_type), from_json_value(v, kind.item_type)) for k, v in pairs]
    return value


def _need(value: Any, wanted: type | tuple[type, ...], kind: pyarrow.DataType) -> Any:
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


def _decimal(text: str, kind: pyarrow.DataType) -> decimal.Decimal:
    with decimal.localcontext() as context:
        context.prec = 76
        number = decimal.Decimal(text).quantize(decimal.Decimal(1).scaleb(-kind.scale))
    if number.adjusted() + 1 > kind.precision - kind.scale and number:
        raise ValueError(f"{text} is out of the range of {kind}")
    return number


def _timestamp(text: str, kind: pyarrow.DataType) -> datetime.datetime:
    moment = datetime.datetime.fromisoformat(text)
    if kind.tz is None:
        if moment.tzinfo is not None:
            raise ValueError(f"{text} has a zone, and the column has none")
        return moment
    return moment.replace(tzinfo=datetime.UTC) if moment.tzinfo is None else moment
