"""The common part of commands that delete: asking first, and continuing past missing names."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import typer

from bookie_aio.structured_logging import escape
from client_aio.cli.exit_codes import Exit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from client_aio.cli.output import Output
    from metadata.errors import BookKeeperError


def ask(question: str, *, is_answered: bool) -> None:
    """Ask on a terminal, and abort the command unless the answer is yes."""
    if is_answered or not sys.stdin.isatty():
        return
    # The event loop's own handler would act on Ctrl-C only after the question was answered.
    of_the_loop = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        typer.confirm(escape(question), abort=True, err=True)
    finally:
        signal.signal(signal.SIGINT, of_the_loop)


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
