"""Passwords of ledgers, for commands: from a file or the environment, never from the command line itself.

What stands on a command line is seen by every user of the machine, and kept in the shell's history.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from client_aio.cli.options import usage_error
from metadata.passwords import PASSWORD_BYTES_MAX

PASSWORD_VARIABLE = "BOOKIE_AIO_PASSWORD"

PasswordFile = Annotated[
    Path | None,
    typer.Option(
        envvar="BOOKIE_AIO_PASSWORD_FILE",
        metavar="FILE",
        help=f"A file with the ledger's password; one newline at its end does not count. Without it "
        f"{PASSWORD_VARIABLE} holds the password. There is no option for the password itself: a command "
        "line is seen by all users of the machine.",
        show_default=False,
    ),
]


def password_of(file: Path | None) -> bytes:
    """Give the password that the file or the environment holds; b"" where neither is given.

    Raises:
        InvalidArgumentError: the file cannot be read, is empty, or too large to be a password.
    """
    if file is None:
        return os.environb.get(PASSWORD_VARIABLE.encode(), b"")
    try:
        with file.open("rb") as source:
            password = source.read(PASSWORD_BYTES_MAX + 3)  # with a line's end, and one more
    except OSError as error:
        usage_error(f"--password-file {file}: {error.strerror}")
    password = password.removesuffix(b"\n").removesuffix(b"\r")
    if not 1 <= len(password) <= PASSWORD_BYTES_MAX:
        usage_error(f"--password-file {file}: a password has 1 to {PASSWORD_BYTES_MAX:,} bytes")
    return password
