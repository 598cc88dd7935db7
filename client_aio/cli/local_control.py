"""`cluster down` and `cluster restart`: what is asked of the process that runs a cluster on this machine.

Owns how that process is found, and the socket at which it takes requests. A request and its answer are a JSON
object on a line each: `{"restart": "b1"}`, and the bookie's row of cluster.json, or an error.

Invariants: a process is signalled only while it holds `supervisor.lock`, so never one that got its id later.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from client_aio.cli.exit_codes import Exit
from client_aio.cli.options import Invocation, command, usage_error
from metadata.errors import BookieUnavailableError, InvalidArgumentError, OperationTimeoutError
from metadata.ids import MALFORMED, check_bookie_id
from metadata.text import escape

app = typer.Typer()

DIRECTORY = Path("bookie-aio-cluster")
"""Of a cluster, where no other one is named."""
STOP_TIMEOUT_S = 20.0
"""The time that a bookie has for a clean stop."""


def _control_path(directory: int, whole: Path) -> str:
    """Return a path of a directory's control socket that is short enough for the system, where it can be."""
    short = f"/proc/self/fd/{directory}"
    return f"{short}/control.sock" if os.path.exists(short) else str(whole / "control.sock")


def control_socket(directory: Path) -> socket.socket:
    """Return the socket that `cluster restart` asks at. Only this user may: the umask says so."""
    (directory / "control.sock").unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        listening.bind(_control_path(descriptor, directory))
        os.chmod(_control_path(descriptor, directory), 0o600)
    finally:
        os.close(descriptor)
    return listening


async def ask_supervisor(directory: Path, request: dict[str, str]) -> dict[str, Any]:
    """Have the process that runs a directory's cluster do something, and return its answer."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        reader, writer = await asyncio.open_unix_connection(_control_path(descriptor, directory))
    except OSError as error:
        raise BookieUnavailableError(
            f"the cluster in {directory} takes no requests (yet): {error.strerror}"
        ) from error
    finally:
        os.close(descriptor)
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise BookieUnavailableError(f"the cluster in {directory} was stopped meanwhile")
    answer: dict[str, Any] = json.loads(line)
    return answer


def supervisor_of(directory: Path) -> int | None:
    """Return the process that runs a directory's cluster; None where none does."""
    path = directory / "supervisor.lock"
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0) or None
    except (FileNotFoundError, NotADirectoryError):
        pass
    return None


def running_in(directory: Path) -> int:
    """Return the process that runs a directory's cluster. Raises BookieUnavailableError where none does."""
    pid = supervisor_of(directory)
    if pid is None:
        raise BookieUnavailableError(
            f"no cluster runs in {directory}: `bookie-aio cluster up --dir {directory}` starts it"
        )
    return pid


_FIELDS: dict[str, Any] = {"metadata": str, "pid": int | None, "spares": int, "bookies": list}
_FIELDS_OF_BOOKIE: dict[str, Any] = {
    "bookie_id": str, "pid": int | None, "addresses": list, "http": str | None, "directory": str, "log": str,
}  # fmt: skip


def read_record(directory: Path) -> dict[str, Any]:
    """Return the content of a directory's cluster.json.

    Raises:
        FileNotFoundError: no cluster has served there yet.
        InvalidArgumentError: it is damaged, or of another release.
    """
    path = directory / "cluster.json"
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        form = document["format"]
        if form == 1:
            _check_fields(document, _FIELDS)
            for row in document["bookies"]:
                _check_fields(row, _FIELDS_OF_BOOKIE)
                for address in row["addresses"]:
                    _check_fields({"addresses": address}, {"addresses": str})
    except MALFORMED as error:
        raise InvalidArgumentError(
            f"{path} is damaged ({error!r}): remove it, and give -n and --metadata as at the first start"
        ) from error
    if form != 1:
        raise InvalidArgumentError(f"{path} has format {form!r}; this release reads 1")
    return document


def _check_fields(document: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Raise LookupError for a field that is missing, ValueError for one of another type."""
    for name, kind in kinds.items():
        if not isinstance(document[name], kind):
            raise ValueError(f"{name} is {document[name]!r}")


def record_of(pid: int, directory: Path) -> dict[str, Any]:
    """Return what a process that runs a directory's cluster has written to cluster.json.

    Raises:
        BookieUnavailableError: nothing yet: it is starting.
    """
    try:
        document = read_record(directory)
    except FileNotFoundError:
        document = {}
    if document.get("pid") != pid:  # an earlier process has written it
        raise BookieUnavailableError(
            f"the cluster in {directory} is starting, and not all of its bookies serve yet: try again later"
        )
    return document


LocalDirectory = Annotated[
    Path, typer.Option("--dir", file_okay=False, help="The directory of `cluster up`.")
]


@command(app, "down")
async def down(invocation: Invocation, directory: LocalDirectory = DIRECTORY) -> None:
    """Stop the cluster that `cluster up` runs in DIR, and wait until all its processes have ended.

    Where none runs, nothing is done. The data stays: `cluster up` brings the same cluster back.
    """
    pid = supervisor_of(directory)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 2 * STOP_TIMEOUT_S
        # The end of a process that is not ours is no event: the lock is polled.
        while supervisor_of(directory) is not None:
            if time.monotonic() > deadline:
                raise OperationTimeoutError(f"the cluster in {directory} (pid {pid}) does not stop")
            await asyncio.sleep(0.05)
    text = f"no cluster runs in {directory}" if pid is None else f"the cluster in {directory} is stopped"
    invocation.output.document({"directory": str(directory), "stopped": pid is not None}, text=text)


@command(app, "restart")
async def restart(
    invocation: Invocation,
    bookies: Annotated[list[str], typer.Argument(metavar="BOOKIE...", help="As b1.", show_default=False)],
    directory: LocalDirectory = DIRECTORY,
) -> int:
    """Restart bookies of the cluster that `cluster up` runs in DIR, one after another.

    A bookie is stopped cleanly if it runs, and started if it does not. The command returns when it serves.
    """
    known = [row["bookie_id"] for row in record_of(running_in(directory), directory)["bookies"]]
    for bookie in bookies:  # all of them, before the first one is stopped
        if check_bookie_id(bookie) not in known:
            usage_error(f"there is no bookie {bookie} here; the bookies are: {', '.join(known)}")
    rows = []
    for bookie in bookies:
        answer = await ask_supervisor(directory, {"restart": bookie})
        if "error" in answer:
            sys.stderr.write(f"bookie-aio: {escape(answer['error'])}\n")
            return int(answer["exit_code"])
        rows.append(answer)
    invocation.output.rows(rows, ("bookie_id", "pid", "addresses", "http"))
    return Exit.OK
