"""Structured logs over the standard library's logging.

A message is a fixed sentence, and values go into named fields: `log.info("bookie started",
extra=fields(bookie="b1"))`. Two formatters write records as `key=value` text, or as one JSON object per line.

Invariants
- One record is one line, for any message and any values of its fields.
- Text from peers and users is escaped (`metadata.text`). It can neither drive a terminal nor forge a line.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from metadata.repeated_reports import PERIOD_S, RepeatedReports
from metadata.text import escape

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping
    from typing import TextIO

_ATTRIBUTE = "bookie_fields"
_PLAIN = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:-+/@[]{}(),;*%<>&#!?$^~|"
)


_VARIABLE = re.compile(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"")


def fields(**values: object) -> dict[str, Mapping[str, object]]:
    """Return the `extra` argument of a logging call, with these fields."""
    return {_ATTRIBUTE: values}


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    found = getattr(record, _ATTRIBUTE, None)
    return found if isinstance(found, dict) else {}


def _quote(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO bookie_aio.server.bookie bookie started bookie=b1`."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        message = " ".join(record.getMessage().splitlines())
        parts = [self.formatTime(record), record.levelname, record.name, message]
        parts += [f"{name}={_quote(value)}" for name, value in _fields_of(record).items()]
        if record.exc_info:
            parts.append("traceback=" + json.dumps(self.formatException(record.exc_info), ensure_ascii=False))
        return escape(" ".join(parts))


class JsonFormatter(TextFormatter):
    """One JSON object per line: `time`, `level`, `logger`, `message`, and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return escape(json.dumps(document, default=str, ensure_ascii=False))


class MessageFormatter(logging.Formatter):
    """The message alone, as Python writes a warning where logging was not configured, and escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return escape(super().formatException(ei), keep="\n")


def configure(*, level: str = "INFO", as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send all log records to a stream, standard error by default.

    It replaces the root logger's handlers, so it is for commands and not for libraries.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class RepeatedWarnings:
    """Records of which peers can cause any number: one line for each reason and minute, with a count.

    The first record is written at once. Further ones are counted, and one line at the end of the minute has
    their count and the fields of the last one. Reasons that differ in numbers and quoted text only are the
    same reason. Beyond `KEYS_MAX` of them all others count together, so that peers cannot make up reasons.
    """

    def __init__(self, logger: logging.Logger, loop: asyncio.AbstractEventLoop) -> None:
        self._logger = logger
        self._reports = RepeatedReports(loop, longest_s=PERIOD_S)

    def warning(self, message: str, *, reason: str, **values: object) -> None:
        """Write a warning with these fields, or count it."""
        self.log(logging.WARNING, message, reason=reason, exc_info=None, **values)

    def log(
        self,
        level: int,
        message: str,
        *,
        reason: str,
        exc_info: BaseException | None = None,
        **values: object,
    ) -> None:
        """Write a record of a level with these fields, or count it. The first one has the traceback."""
        key = (message, _VARIABLE.sub("#", reason))
        if self._reports.is_crowded_for(key):
            key, reason = (message, ""), "other reasons"

        def write(count: int) -> None:
            counted = {"count": count} if count else {}
            extra = fields(**values, reason=reason, **counted)
            self._logger.log(level, message, extra=extra, exc_info=None if count else exc_info)

        self._reports.report(key, write)

    def close(self) -> None:
        """Write the counts that are left, and cancel the timers."""
        self._reports.close()
