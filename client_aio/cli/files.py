"""Files that the command line replaces: as a whole, and durable."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write; it takes its name when the block ends, and is durable then.

    Where the block raises, the file of that name stays as it was. No other user of the machine may read it.
    Two that replace one file at the same time have a draft each.
    """
    descriptor, draft = tempfile.mkstemp(".new", f"{path.name}.", path.parent)
    try:
        with os.fdopen(descriptor, "wb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
