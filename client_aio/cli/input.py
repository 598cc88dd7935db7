"""The input of `ledger write` and `log append`: a file, a pipe or a terminal.

Invariant: waiting for a pipe or a terminal blocks neither the event loop nor the end of the process.

`ask` and `delete_each` are the common part of commands that delete: they ask first, and continue past missing
names.
"""

import asyncio
import errno
import os
import signal
import stat
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

import typer

from client_aio.cli.exit_codes import Exit
from client_aio.cli.options import usage_error
from client_aio.cli.output import Output
from metadata.errors import BookKeeperError
from metadata.text import escape

_CHUNK_BYTES = 1024 * 1024
_CHUNKS_AHEAD = 4
_ENTRY_BYTES_MAX = 8 * _CHUNK_BYTES
"""The writer refuses an entry of this size. So an input without newlines need not fit into memory."""


async def read_chunks(path: str) -> AsyncGenerator[bytes, None]:
    """Yield a file's bytes as they arrive; `-` is standard input.

    Raises:
        OSError: the file cannot be opened or read.
    """
    found = os.fstat(0) if path == "-" else os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        async for data in _read_on_thread(path):
            yield data
        return
    descriptor = _open(path)
    try:
        while data := os.read(descriptor, _CHUNK_BYTES):
            yield data
    finally:
        _close(path, descriptor)


def _open(path: str) -> int:
    return 0 if path == "-" else os.open(path, os.O_RDONLY)


def _close(path: str, descriptor: int) -> None:
    if path != "-":
        os.close(descriptor)


async def _read_on_thread(path: str) -> AsyncGenerator[bytes, None]:
    # A daemon thread: the interpreter would wait at exit for a pool's thread that blocks in read(). Not a
    # non-blocking descriptor: a terminal would then be non-blocking for standard output as well.
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_CHUNKS_AHEAD)

    def put(data: bytes | OSError) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no reader waits any more
            loop.call_soon_threadsafe(arrived.put_nowait, data)

    def read() -> None:
        try:
            descriptor = _open(path)  # blocks for a named pipe until another process opens it for writing
            try:
                data = b"-"
                while data:
                    room.acquire()
                    put(data := os.read(descriptor, _CHUNK_BYTES))
            finally:
                _close(path, descriptor)
        except OSError as error:
            put(error)

    threading.Thread(target=read, name="read input", daemon=True).start()
    while True:
        data = await arrived.get()
        room.release()
        if isinstance(data, OSError):
            raise data
        if not data:
            return
        yield data


def cut(data: bytes, chunk_bytes: int | None, keep_newline: bool) -> tuple[list[bytes], bytes]:
    """Return the whole entries at the start of the data (lines, or chunks), and the remaining bytes."""
    if chunk_bytes is not None:
        end = len(data) - len(data) % chunk_bytes
        return [data[at : at + chunk_bytes] for at in range(0, end, chunk_bytes)], data[end:]
    *lines, rest = data.split(b"\n")
    return [line + b"\n" for line in lines] if keep_newline else lines, rest


def size_of(source: str) -> int | None:
    """Return a file's size in bytes; None for a pipe, a terminal or standard input.

    Raises:
        InvalidArgumentError: it cannot be read. Commands call this before they change anything.
    """
    if source == "-":
        return None
    if not source:
        usage_error("the name of the file is empty: name one, or - for standard input")
    try:
        found = os.stat(source)
    except OSError as error:
        usage_error(f"{source} is not a file that could be read: {error.strerror}")
    if stat.S_ISDIR(found.st_mode):
        usage_error(f"{source} is not a file that could be read: it is a directory")
    if not os.access(source, os.R_OK):
        usage_error(f"{source} is not a file that could be read: {os.strerror(errno.EACCES)}")
    return found.st_size if stat.S_ISREG(found.st_mode) else None


async def read_batches(
    source: str, chunk_bytes: int | None, keep_newline: bool
) -> AsyncGenerator[list[bytes], None]:
    """Yield lists of entries to write, as they arrive; a pipe's first lines do not wait for more."""
    rest: list[bytes] = []
    held = 0
    async with aclosing(read_chunks(source)) as chunks:
        async for data in chunks:
            held += len(data)
            has_end = b"\n" in data if chunk_bytes is None else held >= chunk_bytes
            if not has_end and held < _ENTRY_BYTES_MAX:
                rest.append(data)  # a long entry is joined once: joining at every part would be quadratic
                continue
            whole = b"".join([*rest, data])
            entries, left = cut(whole, chunk_bytes, keep_newline) if has_end else ([whole], b"")
            rest, held = [left], len(left)
            if entries:
                yield entries
    if any(rest):
        yield [b"".join(rest)]


def ask(question: str, *, is_answered: bool, about: Sequence[str] = ()) -> None:
    """Ask on a terminal, and abort the command unless the answer is yes.

    Args:
        about: lines that are shown before the question.
    """
    if is_answered or not sys.stdin.isatty():
        return
    for line in about:
        typer.echo(escape(line), err=True)
    # The event loop's own handlers would act on Ctrl-C and SIGTERM only after the question was answered.
    of_the_loop = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    }
    try:
        typer.confirm(escape(question), abort=True, err=True)
    finally:
        for number, handler in of_the_loop.items():
            signal.signal(number, handler)


async def delete_each(
    output: Output,
    names: Sequence[str],
    delete: Callable[[str], Awaitable[int | str]],
    missing: type[BookKeeperError],
) -> int:
    """Delete one after another, and return the exit code.

    A missing name raises where it is the only one; otherwise it is noted, and the exit code is NOT_FOUND.

    Args:
        delete: deletes what has a name, and returns its name or id in the output.
    """
    ended = Exit.OK
    with output.stream() as put:
        for name in names:
            try:
                deleted = await delete(name)
            except missing as error:
                if len(names) == 1:
                    raise
                output.note(f"bookie-aio: {error}")
                ended = Exit.NOT_FOUND
            else:
                put({"deleted": deleted}, f"deleted {name}")
    return ended
