"""Log records as text and as JSON: one line each, whatever they hold."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING

import pytest

from bookie_aio.structured_logging import configure, fields

if TYPE_CHECKING:
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
