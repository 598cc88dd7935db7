"""Passwords of ledgers, in jobs: where each process finds them, and the messages for a wrong one.

The executors are sent a *place*, the path of a file or the name of a variable. Each process reads the
password there for itself. The password is in no option, so in no plan, event log or page of Spark's. It is in
nothing that is pickled either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from client_aio.config import PASSWORD_VARIABLE, password_in_environment, password_in_file
from metadata.errors import InvalidArgumentError, NoSuchLedgerError, UnauthorizedAccessError
from metadata.model.passwords import check_password

if TYPE_CHECKING:
    import client_aio
    from client_aio.core.digest import Digest
    from client_aio.log.takeover import LogMetadata
    from client_aio.spark.options import ReadOptions, WriteOptions
    from metadata.model.ledger import LedgerMetadata

Options = TypeVar("Options", "ReadOptions", "WriteOptions")


class Place(Protocol):
    """The place of a password: options of reads and writes, or a `PasswordPlace`."""

    @property
    def password_file(self) -> str | None:
        """Return the path of a file that holds it."""

    @property
    def password_env(self) -> str | None:
        """Return the name of a variable that holds it; empty for no password."""


@dataclasses.dataclass(frozen=True, slots=True)
class PasswordPlace:
    """The place of a password, apart from options. With neither field set there is no password."""

    password_file: str | None = None
    password_env: str | None = None

    def as_options(self) -> dict[str, str]:
        """Return the place as options of a read."""
        if self.password_file is not None:
            return {"passwordFile": self.password_file}
        return {"passwordEnv": self.password_env or ""}


def settled(options: Options) -> Options:
    """Settle the place of the password in the driver: without an option, the usual variable, if it is set.

    An executor that lacks the password then fails, and writes nothing unprotected.

    Raises:
        InvalidArgumentError: two places are named, or a file by a path that is not absolute.
    """
    check_place(options.password_file, options.password_env)
    if options.password_file is None and options.password_env is None and password_in_environment():
        return dataclasses.replace(options, password_env=PASSWORD_VARIABLE)
    return options


def settled_place(password_file: str | None, password_env: str | None) -> PasswordPlace:
    """Settle the place for a job's arguments; raises InvalidArgumentError where both are given."""
    check_place(password_file, password_env)
    if password_file is None and password_env is None and password_in_environment():
        password_env = PASSWORD_VARIABLE
    return PasswordPlace(password_file, password_env)


def check_place(password_file: str | None, password_env: str | None) -> None:
    """Raise InvalidArgumentError unless at most one place is named, and a file by an absolute path."""
    if password_file is not None and password_env is not None:
        raise InvalidArgumentError("passwordFile and passwordEnv name two passwords: choose one")
    if password_file is not None and not Path(password_file).is_absolute():
        raise InvalidArgumentError(
            f"passwordFile is read by the driver and by each executor, in folders of their own: give an "
            f"absolute path, not {password_file!r}"
        )


def password_of(place: Place) -> bytes:
    """Read the password in this process; b"" for none.

    Raises:
        InvalidArgumentError: there is no password at the place.
    """
    if place.password_file is not None:
        try:
            return password_in_file(place.password_file)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"passwordFile {error} (on {socket.gethostname()}; every executor needs the file)"
            ) from error
    if not place.password_env:
        return b""
    password = password_in_environment(place.password_env)
    if not password:
        raise InvalidArgumentError(
            f"the environment variable {place.password_env}, which should hold the ledgers' password, is not "
            f"set on {socket.gethostname()}: set it before Spark starts, for executors elsewhere by "
            f"spark.executorEnv.{place.password_env}, or use passwordFile"
        )
    return check_password(password)


async def unlock(client: client_aio.Client, metadata: LedgerMetadata, place: Place) -> Digest:
    """Check before any task starts that the password fits a ledger; return the ledger's digest.

    Raises:
        UnauthorizedAccessError: the password does not fit; the message names its place, and a remedy.
    """
    password = password_of(place)
    try:
        return await client._context.unlock(metadata, password)
    except UnauthorizedAccessError as error:
        if metadata.password is None:
            hint = f"it was read from {_where(place)}; an empty passwordEnv means that there is none"
        elif password:
            hint = f"it was read from {_where(place)}"
        else:
            hint = (
                "name a file that holds it by passwordFile, or an environment variable by passwordEnv "
                f"(by default {PASSWORD_VARIABLE})"
            )
        raise UnauthorizedAccessError(f"{error}: {hint}", ledger_id=metadata.ledger_id) from error


async def unlock_log(client: client_aio.Client, log: LogMetadata, place: Place) -> None:
    """Check by a log's last ledger that the password fits the log; raises as `unlock` does."""
    for row in log.rows[-1:]:
        with contextlib.suppress(NoSuchLedgerError):  # truncated meanwhile
            await unlock(client, await client.ledger_metadata(row.ledger_id), place)


def _where(place: Place) -> str:
    if place.password_file is not None:
        return f"passwordFile {place.password_file}"
    return f"the environment variable {place.password_env}"
