"""A real disk whose journal writes wait, fail, or run out of space when a test says so.

What is written is written; only the moment is the test's. A write that waits is one that the operating
system has not been asked for yet, so nothing about it may be promised. Reservations of space wait as well,
and until then nobody knows that the disk is full.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bookie_aio.storage.disk.disk import RealDisk, RealFile, Space
from metadata.errors import DiskFailedError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.storage.disk.disk import File
    from bookie_aio.wire.blocks import Buffer


class HeldFile(RealFile):
    """A file of a `HeldDisk`."""

    def __init__(self, disk: HeldDisk, descriptor: int, path: str) -> None:
        super().__init__(disk, descriptor, path)
        self._held_disk = disk

    def write_and_sync(
        self,
        buffers: Sequence[Buffer],
        offset: int,
        then: Sequence[tuple[File, Buffer]] = (),
        *,
        at_once: bool = False,
    ) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._gated(buffers, offset, then))

    async def _gated(
        self, buffers: Sequence[Buffer], offset: int, then: Sequence[tuple[File, Buffer]]
    ) -> None:
        disk = self._held_disk
        disk.waiting += 1
        disk.arrived.set()
        try:
            await disk.gate.wait()
        finally:
            disk.waiting -= 1
        if disk.is_failing:
            raise DiskFailedError("the test makes this write fail")
        await super().write_and_sync(buffers, offset, then)

    async def preallocate(self, size: int) -> None:
        await self._held_disk.gate.wait()
        if self._held_disk.is_full:
            raise DiskFullError("the test says there is no space")
        await super().preallocate(size)


class HeldDisk(RealDisk):
    """A `RealDisk` with a gate before its journal and its reservations of space."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.waiting = 0
        self.is_failing = False
        self.is_full = False

    def hold(self) -> None:
        """Let journal writes and reservations wait from now on."""
        self.gate.clear()
        self.arrived.clear()

    def release(self) -> None:
        """Let them go."""
        self.gate.set()

    def space(self, path: str) -> Space:
        space = super().space(path)
        return Space(0, space.total) if self.is_full and self.gate.is_set() else space

    async def _open(self, path: str, flags: int) -> RealFile:
        file = await super()._open(path, flags)
        return HeldFile(self, file._descriptor, path)
