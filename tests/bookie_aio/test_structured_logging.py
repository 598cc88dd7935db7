"""Log records as text and as JSON: one line each, whatever they hold."""

from __future__ import annotations

import io
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from bookie_aio.structured_logging import MessageFormatter, RepeatedWarnings, configure, fields
from metadata.text import escape

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_names_its_fields_on_one_line() -> None:
    stream = io.StringIO()
    configure(stream=stream)
    logging.getLogger("bookie_aio.x").info(
        "bookie started",
        extra=fields(bookie="b1", reason='two words and a "quote"\nand a line', n=3, empty=""),
    )
    (line,) = stream.getvalue().splitlines()
    time, level, logger, rest = line.split(" ", 3)
    assert time.endswith("Z")
    assert (level, logger) == ("INFO", "bookie_aio.x")
    assert rest == (r'bookie started bookie=b1 reason="two words and a \"quote\"\nand a line" n=3 empty=""')


def test_json_is_one_object_per_line() -> None:
    stream = io.StringIO()
    configure(as_json=True, level="WARNING", stream=stream)
    log = logging.getLogger("bookie_aio.x")
    log.info("left out")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it\nfailed", extra=fields(peer="p", error=OSError("e")))
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert (document["level"], document["message"], document["peer"]) == ("ERROR", "it\nfailed", "p")
    assert document["error"] == "e"
    assert "ValueError: broken" in document["traceback"]


def test_a_traceback_stays_on_its_records_line() -> None:
    stream = io.StringIO()
    configure(stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("bookie_aio.x").exception("it\nfailed")
    (line,) = stream.getvalue().splitlines()
    assert "it failed traceback=" in line


EVIL = "\x1b[2J\x9b31m\x85\u202e\u2066\u2029\udce9\nforged"
SHOWN = r"\u001b[2J\u009b31m\u0085\u202e\u2066\u2029\udce9\nforged"


def test_escape_leaves_what_does_no_harm() -> None:
    assert escape(EVIL) == SHOWN
    assert escape('größe – \U0001f642 \\ "', keep="\n") == 'größe – \U0001f642 \\ "'
    assert escape("a\nb\t\r\x7f", keep="\n") == "a\nb\\t\\r\\u007f"


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_in_a_record_drives_a_terminal_or_forges_a_line(as_json: bool) -> None:
    stream = io.StringIO()
    configure(as_json=as_json, stream=stream)
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("x").exception(f"m{EVIL}", extra=fields(client=EVIL))
    (line,) = stream.getvalue().splitlines()
    assert escape(line) == line
    assert SHOWN in line
    if as_json:
        assert json.loads(line)["client"] == EVIL


def test_the_message_alone_is_escaped_and_so_is_its_traceback() -> None:
    stream = io.StringIO()
    configure(stream=stream)
    logging.getLogger().handlers[0].setFormatter(MessageFormatter())
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("x").exception("m%s", EVIL)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == [f"m{SHOWN}", "Traceback (most recent call last):"]
    assert escape(stream.getvalue(), keep="\n") == stream.getvalue()


class ManualLoop:
    """Timers that a test fires."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, partial[None]]] = []
        self.cancelled = 0

    def call_later(self, delay: float, function: Any, *arguments: object) -> ManualLoop:
        self.timers.append((delay, partial(function, *arguments)))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def fire(self) -> None:
        timers, self.timers = self.timers, []
        for delay, function in timers:
            assert delay == 60
            function()


def test_one_line_for_each_reason_and_minute_with_a_count() -> None:
    stream, loop = io.StringIO(), ManualLoop()
    configure(stream=stream)
    warnings = RepeatedWarnings(logging.getLogger("x"), cast("asyncio.AbstractEventLoop", loop))

    def lines() -> list[str]:
        found = [line.split(" x ", 1)[1] for line in stream.getvalue().splitlines()]
        stream.seek(0)
        stream.truncate()
        return found

    for number in range(100):
        warnings.warning("closed", peer=f"p{number}", reason=f"a header of {number:,} bytes")
    warnings.warning("closed", peer="q", reason="no handshake")
    assert lines() == ['closed peer=p0 reason="a header of 0 bytes"', 'closed peer=q reason="no handshake"']
    loop.fire()
    assert lines() == ['closed peer=p99 reason="a header of 99 bytes" count=99']
    loop.fire()
    assert lines() == []
    warnings.warning("closed", peer="r", reason="a header of 7 bytes")
    assert lines() == ['closed peer=r reason="a header of 7 bytes"']
    for number in range(1, 1001):  # a peer that makes up reasons
        warnings.warning("closed", peer="s", reason="x" * number)
    written = lines()
    assert len(written) == 32
    assert written[-1] == 'closed peer=s reason="other reasons"'
    warnings.close()
    assert lines() == ['closed peer=s reason="other reasons" count=968']
    assert loop.cancelled == 33
