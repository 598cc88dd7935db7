"""Passwords of ledgers, for commands: from a file or the environment, never from the command line itself.

What stands on a command line is seen by every user of the machine, and kept in the shell's history.
"""

from pathlib import Path
from typing import Annotated

import typer

from client_aio.cli.options import usage_error
from client_aio.passwords import PASSWORD_VARIABLE, password_in_environment, password_in_file
from metadata.errors import InvalidArgumentError

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
        return password_in_environment()
    try:
        return password_in_file(file)
    except InvalidArgumentError as error:
        usage_error(f"--password-file {error}")
