"""Fields of stored JSON documents: each function returns the checked value, or raises ValueError."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


MALFORMED = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""The errors that parsing a foreign document may raise: `int(1e999)` and deep nesting among others."""


def integer(value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{value!r} is not an integer from {low} to {high}")
    return value


def boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def optional(value: object, low: int, high: int) -> int | None:
    return None if value is None else integer(value, low, high)


def one_of(value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
    return value
