"""A metadata store whose client dies behind the n-th thing that it writes: a crash between two steps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from tests.support.links import ClientStore

if TYPE_CHECKING:
    from metadata.store import Guard, MetadataStore, Version, Versioned


class DiedError(Exception):
    """The client is dead; nothing that it does has an effect any more."""


class MortalStore(ClientStore):
    """One client's view of a store.

    Args:
        lives: how many writes take effect; behind the last one the client is dead.
    """

    def __init__(self, inner: MetadataStore, lives: int) -> None:
        super().__init__(inner, _no_link)
        self.writes = 0
        self.dead = asyncio.Event()
        self._lives = lives

    def _count(self) -> None:
        self.writes += 1
        if self.writes >= self._lives:
            self.dead.set()

    def _check(self) -> None:
        if self.dead.is_set():
            raise DiedError

    async def read(self, key: str) -> Versioned:
        self._check()
        return await self.inner.read(key)

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        version: Version,
        *,
        token: str | None = None,
        guard: Guard | None = None,
    ) -> Version:
        self._check()
        made = await self.inner.compare_and_set(key, value, version, token=token, guard=guard)
        self._count()
        self._check()
        return made

    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        self._check()
        made = await self.inner.create(key, value, token=token)
        self._count()
        self._check()
        return made

    async def delete(
        self,
        key: str,
        version: Version | None = None,
        *,
        keeps_place: bool = False,
        guard: Guard | None = None,
    ) -> None:
        self._check()
        await self.inner.delete(key, version, keeps_place=keeps_place, guard=guard)
        self._count()
        self._check()


def _no_link(_: str) -> NoReturn:
    raise AssertionError("bookies are reached directly")
