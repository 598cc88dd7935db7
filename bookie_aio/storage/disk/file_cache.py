"""The file cache: files that are open for reading, up to a maximum number.
Owns the descriptors of sealed segments and of their indexes. A file is opened when it is read, and closed
when it is the one not used for longest. A file that is being read is never closed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bookie_aio.storage.disk.disk import Disk, File


class _Held:
    __slots__ = ("file", "is_dropped", "users", "waiting")

    def __init__(self, file: File) -> None:
        self.file = file
        self.users = 0
        self.is_dropped = False
        self.waiting: list[asyncio.Future[None]] = []


class FileCache:
    """Open files by path."""

    def __init__(self, disk: Disk, open_max: int) -> None:
        self._disk = disk
        self._open_max = open_max
        self._held: OrderedDict[str, _Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def adopt(self, path: str, file: File) -> None:
        """Take over an open file, and keep it open until `give_back`."""
        assert path not in self._held
        held = self._held[path] = _Held(file)
        held.users = 1
        self._close_some()

    async def borrow(self, path: str) -> File:
        """Return the file, open until `give_back`.

        Raises:
            FileNotFoundError: there is no such file.
        """
        held = self._held.get(path)
        if held is None:
            file = await self._disk.open(path)
            held = self._held.get(path)
            if held is None:
                held = self._held[path] = _Held(file)
            else:  # another caller opened it meanwhile
                file.close()
        held.users += 1
        self._held.move_to_end(path)
        self._close_some()
        return held.file

    def give_back(self, path: str) -> None:
        """End the use of a file: once for each `borrow` or `adopt`."""
        held = self._held.get(path)
        if held is None:  # the cache was closed meanwhile
            return
        held.users -= 1
        if held.is_dropped and not held.users:
            for one in held.waiting:
                if not one.done():
                    one.set_result(None)

    def _close_some(self) -> None:
        while len(self._held) > self._open_max:
            idle = next((path for path, one in self._held.items() if not one.users), None)
            if idle is None:
                return
            self._held.pop(idle).file.close()

    async def drop(self, path: str) -> None:
        """Wait until nobody reads from a file, and close it."""
        held = self._held.get(path)
        if held is None:
            return
        held.is_dropped = True
        while held.users:
            given_back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            held.waiting.append(given_back)
            await given_back
        if self._held.pop(path, None) is not None:
            held.file.close()

    def close(self) -> None:
        """Close all files. Reads under way may fail."""
        for held in self._held.values():
            held.file.close()
        self._held.clear()
