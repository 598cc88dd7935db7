"""A bookie that lost data says so (rule 4), and authorisation has its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    Status,
    Stop,
)
from metadata.ids import TERM_FINAL

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


async def test_what_is_damaged_on_the_disk_is_unknown_and_never_a_negative(
    bookies: Bookies, bookie: Bookie, client: RawClient, tmp_path: Path
) -> None:
    assert (await client.add(7, 0, [PAYLOAD])).status is Status.OK
    assert (await client.add(8, 0, [b"another ledger"])).status is Status.OK
    assert await stop_of(client, read(0, 0)) == (Stop.END, 1)
    damage(tmp_path / "b1")
    assert await stop_of(client, read(0, 0)) == (Stop.UNKNOWN, 0)
    # From here on the bookie cannot say what it held of this ledger, fences included.
    assert await stop_of(client, read(5, 5, TERM_FINAL - 1)) == (Stop.UNKNOWN, 5)
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
