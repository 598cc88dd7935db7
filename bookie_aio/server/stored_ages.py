"""The keys `bookies/ages/ID` of the metadata store: a bookie's own age, and what it sees of the others'.

A directory and the metadata that were set back together agree with each other. Only what other bookies saw
tells of that. So a bookie looks at the ages of others and keeps the highest ones as evidence
(`bookie_aio.core.identity`). It looks at a few of them at a time, in turn.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.core.identity import Peer, watched_by
from metadata.access.bookies import AgeRecord, Cookie, registered_bookies
from metadata.errors import KeyExistsError, MetadataCorruptError, NoSuchKeyError, VersionConflictError
from metadata.ids import age_key, cookie_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from metadata.store import MetadataStore, Version

_LOOKED_AT_ONCE = 8


class PeersSeen(NamedTuple):
    """The outcome of a look at the ages of other bookies."""

    peers: tuple[Peer, ...]
    """The highest ages seen, by id."""
    older: tuple[Peer, ...]
    """Those of which the store has an older age: it was set back."""


class StoredAges:
    """The ages in the metadata store, as one bookie reads and raises them."""

    def __init__(self, store: MetadataStore, bookie_id: str) -> None:
        self._store = store
        self._bookie_id = bookie_id
        self._following = 0

    async def read(self) -> tuple[AgeRecord | None, Version | None]:
        """Read the bookie's own age, and its version; None where there is none."""
        key = age_key(self._bookie_id)
        await self._store.sync(key)
        try:
            text, version = await self._store.read(key)
        except NoSuchKeyError:
            return None, None
        return AgeRecord.from_json(text), version

    async def put(self, age: AgeRecord, version: Version | None) -> None:
        """Write the bookie's own age at that version.

        Raises:
            VersionConflictError: it is at another version, or the write was made by an earlier call.
        """
        key = age_key(self._bookie_id)
        try:
            if version is None:
                await self._store.create(key, age.to_json())
            else:
                await self._store.compare_and_set(key, age.to_json(), version)
        except (KeyExistsError, NoSuchKeyError) as error:
            raise VersionConflictError(f"{key} was changed by another client") from error

    async def look(self, known: Sequence[Peer]) -> PeersSeen:
        """Look at the ages of some other bookies, those that follow the ones looked at before.

        Args:
            known: what was seen of them before.
        """
        names = watched_by(self._bookie_id, await registered_bookies(self._store))
        count = min(len(names), _LOOKED_AT_ONCE)
        first, self._following = self._following, self._following + count
        turn = [names[(first + index) % len(names)] for index in range(count)]
        return await self._look(turn, {peer.bookie_id: peer for peer in known if peer.bookie_id in names})

    async def find_older(self, known: Sequence[Peer]) -> tuple[Peer, ...]:
        """Return those of which the store has an older age than was seen."""
        seen = {peer.bookie_id: peer for peer in known}
        return (await self._look(list(seen), seen)).older

    async def _look(self, names: list[str], seen: dict[str, Peer]) -> PeersSeen:
        older: list[Peer] = []
        for name in names:
            before = seen.get(name)
            with suppress(NoSuchKeyError, MetadataCorruptError):
                seen[name], is_older = await self._see(name, before)
                if is_older:
                    older.append(seen[name])
        return PeersSeen(tuple(seen[name] for name in sorted(seen)), tuple(older))

    async def _see(self, name: str, before: Peer | None) -> tuple[Peer, bool]:
        """Return the highest age seen of another bookie, and whether the store has an older one now.

        Raises:
            NoSuchKeyError: it has none.
        """
        age = AgeRecord.from_json((await self._store.read(age_key(name))).value)
        if before is None:
            return Peer(name, age.token, age.number, await self._incarnation(name)), False
        if age.is_behind(before.token, before.number):  # perhaps the answer of a server that lags
            await self._store.sync(age_key(name))
            age = AgeRecord.from_json((await self._store.read(age_key(name))).value)
        if not age.is_behind(before.token, before.number):
            incarnation = before.incarnation or await self._incarnation(name)
            return Peer(name, age.token, age.number, incarnation), False
        incarnation = await self._incarnation(name)
        if incarnation and before.incarnation not in ("", incarnation):
            return Peer(name, age.token, age.number, incarnation), False  # another bookie has the id by now
        return before, bool(incarnation) and before.incarnation == incarnation

    async def _incarnation(self, name: str) -> str:
        """Return the incarnation of a bookie; empty where it has no cookie."""
        try:
            return Cookie.from_json((await self._store.read(cookie_key(name))).value).incarnation
        except NoSuchKeyError:
            return ""
