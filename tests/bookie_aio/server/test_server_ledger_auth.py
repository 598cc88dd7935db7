"""Ledgers with a password, at one bookie: who has not got its token changes nothing."""

from __future__ import annotations

import asyncio
import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from bookie_aio.core.authorisation import RepairRight
from bookie_aio.server import password_ledgers
from bookie_aio.wire.blocks import Block
from bookie_aio.wire.messages import (
    NO_TERM,
    Add,
    AddFlag,
    Delete,
    Failure,
    Force,
    ListEntries,
    Message,
    Read,
    ReadLac,
    ReadLacAnswer,
    Status,
    WriteLac,
)
from metadata.access.fragments import FragmentHead, FragmentList
from metadata.access.ledgers import LedgerStore
from metadata.ids import TERM_FINAL
from metadata.model.ledger import DIGEST_HMAC, Fragment, LedgerMetadata, UnboundedRecord
from metadata.model.passwords import ROOT_BYTES, SALT_BYTES, PasswordRecord
from tests.support.rawclient import RawClient, block, lac_statement
from tests.support.storage import copy_as_a_crash_leaves_it

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bookie_aio.server.bookie import Bookie
    from metadata.model.paged_list import PageRef
    from metadata.store import Version
    from tests.bookie_aio.server.conftest import Bookies

TOKEN, OTHER = b"t" * 32, b"o" * 32

CHANGES: list[tuple[Message, bytes]] = [
    (Add(7, 0, 0), block(7, 1, [b"forged"])),
    (Add(7, TERM_FINAL, int(AddFlag.RECOVERY)), block(7, 1, [b"forged"])),
    (Add(7, 0, int(AddFlag.DEFERRED_SYNC)), block(7, 1, [b"forged"])),
    (Read(7, TERM_FINAL, 0, 0, 9, 1, 1000), b""),
    (ReadLac(7, TERM_FINAL, -1, 0), b""),
    (WriteLac(7, 0, lac_statement(7, 99)), b""),
    (Delete(7), b""),
]


SETTLED = 10**7
"""The first entry of the second fragment of ledger 7."""


@pytest.fixture(autouse=True)
async def ledgers(bookies: Bookies) -> LedgerStore:
    """Ledger 7 with a password, in its second fragment, and ledger 8 without one."""
    ledgers = LedgerStore(bookies.store())
    protected = await bookies.protect(7)
    _, version = await ledgers.read(7)
    await ledgers.compare_and_set(protected.change_ensemble(SETTLED, ["b2"]), version)
    sizes = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}
    await ledgers.create_ledger(LedgerMetadata.new(8, bookies=["b1"], **sizes))
    return ledgers


async def lock(client: RawClient) -> None:
    answer = await client.call(Add(7, 0, 0), block(7, 0, [b"genuine"]), auth=TOKEN)
    assert answer.status is Status.OK


async def assert_nothing_changed(bookie: Bookie, client: RawClient) -> None:
    """Check that ledger 7 is as `lock` left it, and that its owner goes on."""
    assert bookie._engine is not None
    assert bookie._engine.term(7) == 0
    assert (await client.call(Read(7, NO_TERM, 0, 0, 1, 1, 1000))).entries == [(0, b"genuine")]
    assert bookie._engine.last_entry(7) == 0
    assert not bookie._engine.is_deleted(7)
    assert (statement := bookie._engine.statement(7)) is None or statement.lac == -1
    answer = await client.call(Add(7, 0, 0), block(7, 0, [b"genuine"]), auth=TOKEN)
    assert answer.status is Status.OK


@pytest.mark.parametrize("auth", [None, OTHER, b"", TOKEN + b"t"], ids=["none", "another", "empty", "longer"])
@pytest.mark.parametrize(("request_", "body"), CHANGES, ids=lambda value: type(value).__name__)
async def test_a_request_that_changes_something_is_refused_without_the_token(
    bookie: Bookie, client: RawClient, request_: Message, body: bytes, auth: bytes | None
) -> None:
    await lock(client)
    answer = await client.call(request_, body, auth=auth)
    assert answer.status is Status.UNAUTHORIZED
    assert isinstance(answer.message, Failure)
    assert "ledger 7 has a password" in answer.message.message
    assert TOKEN.decode() not in answer.message.message
    await assert_nothing_changed(bookie, client)


async def test_with_the_token_everything_goes_on_as_ever(client: RawClient) -> None:
    await lock(client)
    for request, body in CHANGES[:6]:
        wanted = Status.OK if request.__class__ is not WriteLac else Status.INVALID_TERM
        if isinstance(request, Add) and request.term == TERM_FINAL:
            continue  # fences
        assert (await client.call(request, body, auth=TOKEN)).status is wanted
    added = await client.call(Add(7, TERM_FINAL, int(AddFlag.RECOVERY)), block(7, 1, [b"x"]), auth=TOKEN)
    assert added.status is Status.OK


async def test_reading_looking_and_repairing_need_no_token(bookie: Bookie, client: RawClient) -> None:
    await lock(client)
    assert (await client.call(Read(7, NO_TERM, 0, 0, 0, 1, 1000))).entries == [(0, b"genuine")]
    assert (await client.call(ReadLac(7, NO_TERM, -1, 0))).status is Status.OK
    assert (await client.call(ListEntries(7, 0))).status is Status.OK
    repair = Add(7, TERM_FINAL, int(AddFlag.REPAIR))
    assert (await client.call(repair, block(7, 0, [b"not the one there"]))).status is Status.OK
    assert (await client.call(Read(7, NO_TERM, 0, 0, 0, 1, 1000))).entries == [(0, b"genuine")]
    assert bookie._engine is not None
    assert bookie._engine.term(7) == 0, "a repair without a token has fenced a locked ledger"


@pytest.mark.parametrize("auth", [None, OTHER], ids=["none", "another"])
async def test_without_the_token_a_repair_puts_nothing_above_what_is_here(
    bookie: Bookie, client: RawClient, auth: bytes | None
) -> None:
    """It would hide the genuine copy for good: readers would be told of stale metadata."""
    await lock(client)
    repair, forged = Add(7, TERM_FINAL, int(AddFlag.REPAIR)), block(7, 0, [b"forged"], content_term=1)
    assert (await client.call(repair, forged, auth=auth)).status is Status.UNAUTHORIZED
    await assert_nothing_changed(bookie, client)


async def test_without_the_token_a_repair_puts_nothing_above_the_ledgers_term(
    bookie: Bookie, client: RawClient
) -> None:
    """It would hide what the writer adds there later."""
    await lock(client)
    repair = Add(7, 0, int(AddFlag.REPAIR))
    forged = block(7, 1, [b"forged"], content_term=1)
    answer = await client.call(repair, forged)
    assert answer.status is Status.UNAUTHORIZED
    assert isinstance(answer.message, Failure)
    assert "none above 0 here" in answer.message.message
    await assert_nothing_changed(bookie, client)
    # Of a term that the bookie has heard of there may be something to repair, without the password.
    added = await client.call(Add(7, 1, 0), block(7, 9, [b"of term 1"], content_term=1), auth=TOKEN)
    assert added.status is Status.OK
    assert (await client.call(repair, forged)).status is Status.OK


async def stated(client: RawClient) -> int | None:
    answer = (await client.call(ReadLac(7, NO_TERM, -1, 0))).message
    assert isinstance(answer, ReadLacAnswer)
    return answer.statement.lac if answer.statement is not None else None


@pytest.mark.parametrize("how", ["closed", "crashed"])
async def test_the_lac_in_a_repair_is_never_stated(
    bookies: Bookies, bookie: Bookie, client: RawClient, tmp_path: Path, how: str
) -> None:
    await lock(client)
    repair = Add(7, 0, int(AddFlag.REPAIR))
    assert (await client.call(repair, block(7, 10**6, [b"junk"], lac=10**6 - 1))).status is Status.OK
    assert await stated(client) == -1
    # Nor does it hide what the writer states.
    assert (await client.call(WriteLac(7, 0, lac_statement(7, 0)), auth=TOKEN)).status is Status.OK
    assert await stated(client) == 0
    if how == "crashed":
        crashed = copy_as_a_crash_leaves_it(tmp_path / "b1", tmp_path / "crashed")
        await bookie.close()
        (tmp_path / "b1").rename(tmp_path / "gone")
        crashed.rename(tmp_path / "b1")
    for _ in range(2):  # once from the journal, then from what the start made of it
        await bookie.close()
        bookie = await bookies.start()
        assert await stated(await bookies.connect(bookie)) == 0


async def test_with_the_token_a_repair_supersedes_what_is_of_a_former_term(client: RawClient) -> None:
    await lock(client)
    repair = Add(7, 0, int(AddFlag.REPAIR))
    answer = await client.call(repair, block(7, 0, [b"of term 1"], content_term=1), auth=TOKEN)
    assert answer.status is Status.OK
    assert (await client.call(Read(7, NO_TERM, 1, 0, 0, 1, 1000))).entries == [(0, b"of term 1")]


async def test_a_lock_survives_a_restart(bookies: Bookies, bookie: Bookie, client: RawClient) -> None:
    await lock(client)
    await bookie.close()
    bookie = await bookies.start()
    again = await bookies.connect(bookie)
    for auth in (None, OTHER):
        assert (await again.call(ReadLac(7, TERM_FINAL, -1, 0), auth=auth)).status is Status.UNAUTHORIZED
    await assert_nothing_changed(bookie, again)


async def test_a_ledger_without_a_password_needs_no_token(client: RawClient) -> None:
    assert (await client.add(8, 0, [b"a"])).status is Status.OK
    assert (await client.call(ReadLac(8, TERM_FINAL, -1, 0))).status is Status.OK
    assert (await client.call(ReadLac(8, TERM_FINAL, -1, 0), auth=b"short")).status is Status.UNAUTHORIZED


@pytest.mark.parametrize("ledger_id", [8, 99], ids=["no password", "no metadata"])
async def test_a_token_does_not_lock_a_ledger_without_a_password(client: RawClient, ledger_id: int) -> None:
    """One request with a made-up token would keep its writer out for good."""
    assert (await client.add(ledger_id, 0, [b"a"])).status is Status.OK
    answer = await client.call(Force(ledger_id, 0), auth=OTHER)
    assert answer.status is Status.UNAUTHORIZED
    assert isinstance(answer.message, Failure)
    assert f"no ledger {ledger_id} with a password" in answer.message.message
    assert (await client.add(ledger_id, 1, [b"b"])).status is Status.OK


async def test_a_first_token_is_believed_again_once_the_metadata_store_answers(
    bookies: Bookies, client: RawClient
) -> None:
    """Requests behind it stay in order: they wait for the same answer."""
    assert (await client.call(Force(9, 0), auth=TOKEN)).status is Status.UNAUTHORIZED
    await bookies.protect(9)
    locking = [client.send(Add(9, 0, 0), block(9, at, [b"x"]), auth=TOKEN) for at in range(3)]
    assert [(await one).status for one in locking] == [Status.OK] * 3
    assert (await client.add(9, 3, [b"x"])).status is Status.UNAUTHORIZED
    assert [answer.request_id for answer in client.arrived] == sorted(
        one.request_id for one in client.arrived
    )


async def test_an_answer_that_nobody_took_is_not_given_to_a_later_token(
    bookies: Bookies, bookie: Bookie
) -> None:
    """A stranger asks for the next ledger and disconnects. Its owner, who comes later, is not refused."""
    passwords = bookie._passwords
    assert passwords is not None
    for is_there in (False, True):
        asking = passwords.has_password(9)
        assert isinstance(asking, asyncio.Future)
        await asking
        await asyncio.sleep(0)  # the callbacks behind the answer
        await asyncio.sleep(0)
        if not is_there:
            await bookies.protect(9)
    assert passwords.has_password(9) is True


async def test_without_the_token_a_repair_stores_nothing_behind_what_is_settled(
    client: RawClient, ledgers: LedgerStore
) -> None:
    """A recovery would find the junk where it looks for the end of the ledger."""
    await lock(client)
    repair = Add(7, 0, int(AddFlag.REPAIR))
    assert (await client.call(repair, block(7, SETTLED - 1, [b"settled"]))).status is Status.OK
    refused = await client.call(repair, block(7, SETTLED, [b"junk"]))
    assert refused.status is Status.UNAUTHORIZED
    metadata, version = await ledgers.read(7)
    await ledgers.compare_and_set(metadata.close(SETTLED, 100), version)
    assert (await client.call(repair, block(7, SETTLED, [b"the last one"]))).status is Status.OK
    assert (await client.call(repair, block(7, SETTLED + 1, [b"junk"]))).status is Status.UNAUTHORIZED


async def test_without_the_token_a_repair_stores_what_the_metadata_give_that_content_term(
    bookies: Bookies, client: RawClient, ledgers: LedgerStore
) -> None:
    """A bookie that missed a takeover gets its entries back from auto recovery, which has no password."""
    await ledgers.create_ledger(_taken_over((0, 10, 20)))
    held = await client.call(Add(11, 1, 0), block(11, 10, [b"dirty"], content_term=1), auth=TOKEN)
    assert held.status is Status.OK

    async def repair(first: int, content_term: int, payload: bytes = b"x") -> Status:
        request = Add(11, 0, int(AddFlag.REPAIR))
        return (await client.call(request, block(11, first, [payload], content_term=content_term))).status

    assert await repair(12, 3) is Status.UNAUTHORIZED  # made up: the metadata say 2
    assert await repair(5, 2) is Status.UNAUTHORIZED
    assert await repair(20, 3) is Status.UNAUTHORIZED  # not settled
    assert await repair(12, 2) is Status.OK
    assert await repair(10, 2, b"genuine") is Status.OK  # above the copy of a writer that was fenced
    assert (await client.call(Read(11, NO_TERM, 2, 10, 10, 1, 1000))).entries == [(10, b"genuine")]
    assert (await client.call(Add(11, 1, 0), block(11, 11, [b"y"], content_term=1), auth=TOKEN)).status is (
        Status.OK  # no term was raised
    )


@functools.cache  # a takeover takes longer the more there were before
def _taken_over(firsts: Sequence[int]) -> LedgerMetadata:
    """Return an unbounded ledger 11 with a password, taken over at these entries; terms 1, 2, 3 and so on."""
    metadata = LedgerMetadata.new(
        11, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1"], digest=DIGEST_HMAC,
        password=PasswordRecord(bytes(SALT_BYTES), bytes(ROOT_BYTES)),
        unbounded=UnboundedRecord("orders"),
    )  # fmt: skip
    for first in firsts:
        taken = metadata.take_over()
        metadata = taken.open_term(first, ["b1"], length=first, fragments=taken.fragments)
    return metadata


async def _paged(bookies: Bookies, ledgers: LedgerStore) -> tuple[FragmentHead, Version, FragmentList]:
    """Make ledger 11 of 2,000 fragments. Term n has the ten entries from 10 * (n - 1) on."""
    pages = FragmentList(ledgers, 11, lambda: "token", 60.0)

    async def same(head: FragmentHead) -> FragmentHead:
        return head

    await ledgers.create_ledger(_taken_over(range(0, 20_000, 10)))
    head, version, _ = await pages.change(*await pages.read(), same)
    return head, version, pages


async def test_without_the_token_a_repair_stores_what_a_page_gives_that_content_term(
    bookies: Bookies, client: RawClient, ledgers: LedgerStore
) -> None:
    """Fragments leave the head of the metadata for pages, perhaps before a bookie is repaired."""

    async def without(head: FragmentHead) -> FragmentHead:
        return FragmentHead(await pages.without_before(head.metadata, last.first))

    head, version, pages = await _paged(bookies, ledgers)
    before, last = head.rows.pages[-2:]  # each has fragments of many terms
    assert len(head.rows.pages) > 2
    assert (await client.call(Add(11, 1, 0), block(11, 0, [b"x"], content_term=1), auth=TOKEN)).status is (
        Status.OK
    )

    async def repair(first: int, content_term: int, entries: int = 1) -> Status:
        request = Add(11, 0, int(AddFlag.REPAIR))
        body = block(11, first, [b"x"] * entries, content_term=content_term)
        return (await client.call(request, body)).status

    def term_of(entry_id: int) -> int:
        return entry_id // 10 + 1

    for first in (20, before.first, last.first - 1, last.first, head.rows.rows[0][0] - 1):
        assert await repair(first, term_of(first) + 1) is Status.UNAUTHORIZED, first  # made up
        assert await repair(first, term_of(first)) is Status.OK, first
    # Some are of the page before, and of another content term.
    for term in (term_of(last.first) - 1, term_of(last.first)):
        assert await repair(last.first - 3, term, 6) is Status.UNAUTHORIZED, term
    assert await repair(last.first - 4, term_of(last.first - 4), 3) is Status.OK

    # The list has changed, and the page that the bookie knows of is gone.
    await pages.change(head, version, without)
    for page in head.rows.pages[:-1]:
        await pages.delete_pages([page.name])
    assert await repair(before.first - 20, term_of(before.first - 20)) is Status.UNAUTHORIZED  # trimmed
    assert await repair(last.first + 25, term_of(last.first + 25)) is Status.OK


async def test_requests_for_one_page_read_it_once(
    bookies: Bookies, bookie: Bookie, ledgers: LedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _paged(bookies, ledgers)
    passwords, reads, real = bookie._passwords, list[str](), FragmentList.page
    assert passwords is not None

    async def page(self: FragmentList, ref: PageRef) -> tuple[Fragment, ...]:
        reads.append(ref.name)
        return await real(self, ref)

    monkeypatch.setattr(FragmentList, "page", page)
    asked = Block.parse(memoryview(block(11, 20, [b"x"], content_term=3)))
    rights = await asyncio.gather(*(passwords.may_repair(asked, nullcontext) for _ in range(20)))
    assert set(rights) == {RepairRight.NAMED}
    assert len(reads) == 1


async def test_what_is_known_of_ledgers_is_bounded_by_their_fragments(
    bookies: Bookies, bookie: Bookie, ledgers: LedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, *_ = await _paged(bookies, ledgers)
    weight = 2 + len(head.rows.rows) + len(head.rows.pages)
    monkeypatch.setattr(password_ledgers, "_KNOWN_MAX", weight + 1)
    passwords = bookie._passwords
    assert passwords is not None
    for number in (7, 11, 8, 7, 11):
        known = passwords.has_password(number)
        assert (await known if isinstance(known, asyncio.Future) else known) is (number != 8)
    assert list(passwords._known) == [11]
    assert passwords._weight == weight
