"""A bookie that lost data says so (rule 4), and authorisation has its place."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.messages import (
    NO_TERM,
    AddFlag,
    ListEntries,
    ListEntriesAnswer,
    Message,
    Ping,
    Read,
    ReadAnswer,
    ReadLac,
    ReadLacAnswer,
    Status,
    Stop,
)
from metadata.ids import TERM_FINAL
from tests.bookie_aio.server.conftest import engine_of

if TYPE_CHECKING:
    from pathlib import Path

    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.rawclient import RawClient

PAYLOAD = b"bytes that are found on the disk"


def damage(directory: Path) -> None:
    """Turn a bit of the payload where it lies in a segment."""
    for path in directory.glob("*.segment"):
        data = path.read_bytes()
        at = data.find(PAYLOAD)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 1]))
            return
    raise AssertionError("the payload is in no segment")


def read(first: int, last: int, term: int = NO_TERM) -> Read:
    return Read(7, term, 0, first, last, 1, 1024)


async def stop_of(client: RawClient, request: Read) -> tuple[int, int]:
    answer = (await client.call(request)).message
    assert isinstance(answer, ReadAnswer)
    return answer.stop, answer.stop_entry


async def is_in_doubt(client: RawClient) -> bool:
    answer = (await client.call(ReadLac(7, NO_TERM, -1, 0))).message
    assert isinstance(answer, ReadLacAnswer)
    return answer.is_damaged


async def test_an_entry_that_is_listed_and_damaged_is_unknown_and_no_other_one(
    bookies: Bookies, bookie: Bookie, client: RawClient, tmp_path: Path
) -> None:
    """What the bookie lists is all that it had: it has lost the bytes of one entry, and forgotten nothing."""
    assert (await client.add(7, 0, [PAYLOAD])).status is Status.OK
    assert (await client.add(7, 1, [b"behind it"])).status is Status.OK
    damage(tmp_path / "b1")
    assert await stop_of(client, read(0, 0)) == (Stop.UNKNOWN, 0)
    for _ in range(2):
        assert await stop_of(client, read(5, 5)) == (Stop.NO_SUCH_ENTRY, 5)
        assert not await is_in_doubt(client)
        listing = (await client.call(ListEntries(7, 0))).message
        assert isinstance(listing, ListEntriesAnswer)
        assert listing.is_damaged
        assert engine_of(bookie).is_damaged(7)
        await bookie.close()
        bookie = await bookies.start()
        client = await bookies.connect(bookie)
    assert await stop_of(client, read(0, 0)) == (Stop.UNKNOWN, 0)
    assert (await client.add(7, 2, [b"an ordinary one"])).status is Status.OK


async def test_a_bookie_that_may_have_forgotten_entries_denies_none(
    bookies: Bookies, bookie: Bookie, client: RawClient, tmp_path: Path
) -> None:
    assert (await client.add(7, 0, [PAYLOAD])).status is Status.OK
    assert (await client.add(8, 0, [b"another ledger"])).status is Status.OK
    assert await stop_of(client, read(0, 0)) == (Stop.END, 1)
    damage(tmp_path / "b1")
    assert await stop_of(client, read(0, 0)) == (Stop.UNKNOWN, 0)
    await when_durable(partial(engine_of(bookie).append_mark, 7))
    # From here on the bookie cannot say what it held of this ledger, fences included.
    assert await stop_of(client, read(5, 5, TERM_FINAL - 1)) == (Stop.UNKNOWN, 5)
    assert await is_in_doubt(client)
    listing = (await client.call(ListEntries(7, 0))).message
    assert isinstance(listing, ListEntriesAnswer)
    assert listing.is_damaged
    assert (await client.add(7, 1, [b"x"], term=TERM_FINAL - 1)).status is Status.DATA_LOST
    assert (await client.add(8, 1, [b"x"])).status is Status.OK
    await bookie.close()
    again = await bookies.connect(await bookies.start())
    assert (await again.add(7, 1, [b"x"], term=TERM_FINAL)).status is Status.DATA_LOST
    assert (await again.call(ReadLac(7, TERM_FINAL, -1, 0))).status is Status.OK
    rescued = again.add(7, 0, [PAYLOAD], term=TERM_FINAL, flags=AddFlag.RECOVERY)
    assert (await rescued).status is Status.OK
    assert (await again.call(read(0, 0))).entries == [(0, PAYLOAD)]


class NoReading:
    """Refuses reads without the word."""

    def authorise(self, peer: object, request: Message, auth: bytes | None, answer: object) -> str | None:
        return "say the word" if isinstance(request, Read) and auth != b"please" else None


async def test_every_request_passes_the_authoriser(bookies: Bookies) -> None:
    bookie = await bookies.start(authoriser=NoReading())
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"a"])).status is Status.OK
    assert (await client.call(read(0, 0))).status is Status.UNAUTHORIZED
    assert (await client.call(read(0, 0), auth=b"please")).entries == [(0, b"a")]
    assert (await client.call(Ping())).status is Status.OK
