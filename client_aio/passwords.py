"""Passwords of ledgers as programs are told them: from a file, or from the environment.

Never from a command line or an option of a job: what stands there is seen by others, and kept.
"""

from __future__ import annotations

import os
from pathlib import Path

from metadata.errors import InvalidArgumentError
from metadata.passwords import PASSWORD_BYTES_MAX

PASSWORD_VARIABLE = "BOOKIE_AIO_PASSWORD"


def password_in_environment(variable: str = PASSWORD_VARIABLE) -> bytes:
    """Give the password that a variable holds; b"" where it is not set."""
    return os.environb.get(os.fsencode(variable), b"")


def password_in_file(file: str | Path) -> bytes:
    """Give the password that a file holds; one newline at its end does not count.

    Raises:
        InvalidArgumentError: the file cannot be read, is empty, or too large to be a password. The message
            tells nothing of what is in it.
    """
    try:
        with Path(file).open("rb") as source:
            password = source.read(PASSWORD_BYTES_MAX + 3)  # with a line's end, and one more
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgumentError(f"{file}: {reason}") from error
    password = password.removesuffix(b"\n").removesuffix(b"\r")
    if not 1 <= len(password) <= PASSWORD_BYTES_MAX:
        raise InvalidArgumentError(f"{file}: a password has 1 to {PASSWORD_BYTES_MAX:,} bytes")
    return password
