"""The output of commands: results on standard output, everything else on standard error.

A result is a table, JSON, or JSON lines.

Invariants: standard output holds the result and nothing else, so that it can be piped. Progress is a bar,
where standard error is a terminal. Elsewhere only commands that may take hours write a line now and then. All
text is escaped (`metadata.text`): peers and users chose names, keys and values. Only the entries
of a ledger are written as they are.
"""

import asyncio
import base64
import codecs
import enum
import io
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TextIO

from metadata.text import escape

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

Row = Mapping[str, Any]


class Format(enum.StrEnum):
    """The forms of a result."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


def prepare_streams() -> None:
    """Open closed standard streams on the null device, and print to any encoding.

    The next file or socket that the process opens would otherwise get the number of the closed stream.
    A closed standard input or output is opened for the other direction: its use fails, and the exit code
    shows the failure. Messages for a closed standard error are dropped.
    """
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    sys.stdin = sys.stdin or _opened(0, "r")
    sys.stdout = sys.stdout or _opened(1, "w")
    sys.stderr = sys.stderr or _opened(2, "w")
    codecs.register_error("bookie-aio", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="bookie-aio")


def _opened(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", closefd=False)


def silence_output() -> None:
    """Drop output that could not be written: the interpreter would try again at exit, and fail aloud."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


_ASCII = str.maketrans(
    {"–": "-", "−": "-", "…": "...", "→": "->", "█": "#", "─": "-", "│": "|", "┬": "+", "├": "+", "└": "+"}
)


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that the encoding does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "backslashreplace"), error.end


class Output:
    """Prints results in one form."""

    def __init__(self, form: Format) -> None:
        self.form = form

    @cached_property
    def _errors(self) -> "Console":
        # rich is imported only to show something: most commands, and every bookie, start without it.
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    @property
    def is_table(self) -> bool:
        """Return whether the result is for a person to read."""
        return self.form is Format.TABLE

    def rows(self, rows: Sequence[Row], columns: Sequence[str]) -> None:
        """Print rows: a table of these columns, one JSON array, or one JSON object a line, with all keys."""
        if self.form is Format.TABLE:
            self._table(rows, columns)
        elif self.form is Format.JSON:
            self._write(_json(list(rows), indent=2))
        else:
            for row in rows:
                self._write(_json(row))

    def document(self, document: Row, *, text: str | None = None) -> None:
        """Print one object: its keys and values line by line (or the text given), or JSON."""
        if self.form is Format.TABLE:
            self._write(text if text is not None else "\n".join(_lines(document)))
        else:
            self._write(_json(document, indent=2 if self.form is Format.JSON else None))

    @contextmanager
    def stream(self) -> Iterator[Callable[[Row, str], None]]:
        """Return a function that prints one object of many as it arrives: its text, or its JSON.

        As JSON the objects are one array. The array is closed even when the stream ends with an error, which
        the exit code tells.
        """
        if self.form is not Format.JSON:
            yield lambda row, text: self.document(row, text=text)
            return
        opening = "["

        def put(row: Row, text: str) -> None:
            nonlocal opening
            sys.stdout.write(f"{opening}\n  {_json(row)}")
            sys.stdout.flush()
            opening = ","

        try:
            yield put
        finally:
            self._write("[]" if opening == "[" else "\n]")

    def value(self, key: str, value: Any) -> None:
        """Print one bare value, or an object of one key."""
        self.document({key: value}, text=str(value))

    def note(self, message: str) -> None:
        """Print a message to the user that is not part of the result."""
        self._errors.print(escape(message), markup=False, emoji=False)

    def progress(self) -> "Progress":
        """Return a progress display on standard error, which shows nothing where that is no terminal."""
        import rich.progress

        return rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=30),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[figures]}"),
            rich.progress.TimeElapsedColumn(),
            console=self._errors,
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    @asynccontextmanager
    async def tracking(
        self, what: str, *, every_s: float | None = 10.0
    ) -> AsyncIterator[Callable[[int, int | None, str], None]]:
        """Return a function that shows how far a long command is: what is done, of how much, and a text.

        On a terminal it moves a bar. Elsewhere a line is written to standard error every ten seconds, even
        while nothing moves; with None, nothing is.
        """
        state = ""

        def show(done: int, total: int | None, figures: str) -> None:
            nonlocal state
            state = f"{done:,}{'' if total is None else f' of {total:,}'} {figures}"
            # Without a total the bar says nothing of how much is done.
            progress.update(task, completed=done, total=total, figures=state if total is None else figures)

        async def write_lines(pause_s: float) -> None:
            while True:
                await asyncio.sleep(pause_s)
                self.note(f"{what}: {state or 'begins'}")

        writing = None
        if every_s is not None and not sys.stderr.isatty():
            writing = asyncio.create_task(write_lines(every_s))
        try:
            with self.progress() as progress:
                task = progress.add_task(what, total=None, figures="")
                yield show
        finally:
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    def _table(self, rows: Sequence[Row], columns: Sequence[str]) -> None:
        import rich.box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            numeric = bool(rows) and all(isinstance(row.get(column), int | float) for row in rows)
            table.add_column(column.replace("_", " "), justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        console = Console(highlight=False, markup=False, emoji=False)
        if not console.is_terminal:
            console.width = max(200, console.width)  # wide, so that no row is folded in a pipe
        with console.capture() as capture:
            console.print(table)
        # Written here: the console would end the process by itself where the reader has gone away.
        sys.stdout.write(capture.get())
        sys.stdout.flush()

    def _write(self, text: str) -> None:
        sys.stdout.write(escape(text, keep="\n") + "\n")
        sys.stdout.flush()


def _json(value: Any, indent: int | None = None) -> str:
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    try:
        text = json.dumps(value, indent=indent, default=_plain, ensure_ascii=not is_unicode, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=indent, default=_plain, ensure_ascii=not is_unicode)
    return escape(text, keep="\n")


def _finite(value: Any) -> Any:
    """Return a value with texts in the place of infinity and NaN, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not have: bytes as Base64, as in ledger metadata."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    return str(value)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{_cell(key)}={_cell(item)}" for key, item in value.items())
    return escape(str(value))


def _lines(document: Row, indent: str = "") -> list[str]:
    found: list[str] = []
    width = max((len(escape(str(key))) for key in document), default=0)
    for key, value in document.items():
        label = escape(str(key)).replace("_", " ")
        if isinstance(value, Mapping) and value:
            found += [f"{indent}{label}", *_lines(value, indent + "  ")]
        else:
            found.append(f"{indent}{label:<{width}}  {_cell(value)}")
    return found
