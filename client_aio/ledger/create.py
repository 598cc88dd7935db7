"""Making a ledger: its settings, and the steps from an id to a writer that has started.

Owns the check of the settings. Does not own the writers: an application's ledger and each ledger of a log are
made here.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from bookie_aio.wire.messages import VERSION_IS_FREE, Done, IsFree
from client_aio.bookies.connection import BookieConnection
from client_aio.bookies.ensemble_finder import Sizes
from client_aio.core.digest import check_choice
from client_aio.ledger.writer import LedgerWriter
from metadata.awake import awake_wait
from metadata.errors import (
    BookKeeperError,
    InvalidArgumentError,
    LedgerExistsError,
    LedgerIdTakenError,
    NoSuchLedgerError,
    TooManyRequestsError,
    VersionConflictError,
)
from metadata.model.ledger import DIGESTS, LedgerMetadata, check_custom, check_quorums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.model.ledger import UnboundedRecord
    from metadata.store import Version

logger = logging.getLogger(__name__)

Writer = TypeVar("Writer", bound=LedgerWriter)

_IDS_TRIED_MAX = 8
_ASKED_S = 1.0
"""The time that bookies have to say whether an id is free."""
_ASKED_MORE_S = 0.2
"""The same, for the last Qw − Qa of them."""
_ASK_AGAIN_S = 0.02
"""The pause before a bookie is asked again that has too many such requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """How a ledger replicates and protects its entries; see `Client.create_ledger`."""

    ensemble_size: int = 3
    write_quorum: int = 3
    ack_quorum: int = 2
    digest: str = "crc32c"
    password: bytes = field(default=b"", repr=False)
    custom_metadata: Mapping[str, bytes] | None = None
    guaranteed_write_quorum: bool = False

    def __post_init__(self) -> None:
        check_quorums(self.ensemble_size, self.write_quorum, self.ack_quorum)
        if self.digest not in DIGESTS:
            raise InvalidArgumentError(
                f"digest {self.digest!r} is unknown; choose one of {', '.join(DIGESTS)}"
            )
        object.__setattr__(self, "password", check_choice(self.digest, self.password))
        object.__setattr__(
            self,
            "custom_metadata",
            check_custom({} if self.custom_metadata is None else self.custom_metadata),
        )


async def create_ledger(
    context: ClientContext,
    settings: LedgerSettings,
    make: Callable[[ClientContext, LedgerMetadata, Version, Digest], Writer],
    *,
    id_min: int = 0,
) -> Writer:
    """Create a ledger and start its writer.

    Args:
        make: builds the writer.
        id_min: the least acceptable id; lower ids are drawn and lost.

    Raises:
        NotEnoughBookiesError: too few bookies can be reached; see `EnsembleFinder.find`.
        LedgerIdTakenError: bookies refused every id that was drawn.
        MetadataUnavailableError: the ledger may exist, now or later. No client has its id.
    """
    metadata, version, proof, connections = await create_metadata(context, settings, id_min=id_min)
    return await start_writer(context, make(context, metadata, version, proof), connections)


async def create_metadata(
    context: ClientContext,
    settings: LedgerSettings,
    *,
    id_min: int = 0,
    unbounded: UnboundedRecord | None = None,
) -> tuple[LedgerMetadata, Version, Digest, dict[str, BookieConnection | BookKeeperError]]:
    """Write a new ledger's metadata, under an id that the bookies chosen have never heard of.

    A metadata store that was set back to an older copy gives ids out twice. A bookie that holds or has
    dropped the former ledger says so, and another id is drawn. The bookies are asked while the metadata are
    written. One that is down is not asked.

    Returns:
        The metadata and their version; the ledger's digest; the connections to its bookies, with an error for
        each bookie that is down.

    Raises:
        NotEnoughBookiesError: too few bookies can be reached; see `EnsembleFinder.find`.
        LedgerIdTakenError: bookies refused every id that was drawn.
        MetadataUnavailableError: the ledger may exist, now or later. No client has its id.
    """
    refused: LedgerIdTakenError | LedgerExistsError | None = None
    for _ in range(_IDS_TRIED_MAX):
        metadata, proof, connections = await _new_metadata(
            context, settings, id_min=id_min, unbounded=unbounded
        )
        # A bookie without a registration gets no adds yet. It may be there all the same, and know the id.
        asked = (
            found if isinstance(found, BookieConnection) else context.pool.peek(name)
            for name, found in connections.items()
        )
        asking = asyncio.ensure_future(_refusal(context, metadata, filter(None, asked)))
        try:
            version = await context.ledgers.create_ledger(metadata, token=context.draw_token())
            refused = await asking
            if refused is None:
                return metadata, version, proof, connections
            with suppress(NoSuchLedgerError, VersionConflictError):
                await context.ledgers.delete(metadata.ledger_id, version)
        except LedgerExistsError as error:
            refused = error
        finally:
            asking.cancel()
        logger.warning("ledger=%d another id is drawn: %s", metadata.ledger_id, refused)
        context.ledgers.discard_ids()
    assert refused is not None
    raise refused


async def _refusal(
    context: ClientContext, metadata: LedgerMetadata, connections: Iterable[BookieConnection]
) -> LedgerIdTakenError | None:
    """Ask the bookies of a new ledger whether its id is free; return the first refusal.

    A bookie that does not answer in time does not hold the creation up: it proves nothing. Where only bookies
    are silent that the ledger could do without (Qw − Qa), the time is short: a takeover must not wait for a
    bookie that hangs.
    """
    ledger_id = metadata.ledger_id

    async def ask(connection: BookieConnection) -> LedgerIdTakenError | None:
        timeout_s = context.config.read_timeout_s
        while True:
            try:
                await connection.call(IsFree(ledger_id), Done, timeout_s=timeout_s, ledger_id=ledger_id)
            except LedgerIdTakenError as error:
                return error
            except TooManyRequestsError:  # of many creations at once; whoever asks ends this task in time
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            except BookKeeperError as error:
                logger.debug("ledger=%d bookie=%s was not asked: %s", ledger_id, connection.bookie_id, error)
            return None

    asked = [asyncio.ensure_future(ask(each)) for each in connections if each.version >= VERSION_IS_FREE]
    spare, waiting = metadata.write_quorum - metadata.ack_quorum, set(asked)
    try:
        while waiting:
            timeout_s = _ASKED_S if len(waiting) > spare else _ASKED_MORE_S
            done, waiting = await awake_wait(waiting, timeout_s)
            for task in done:
                if not task.cancelled() and (refusal := task.result()) is not None:
                    return refusal
            if not done:
                break
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return None


async def _new_metadata(
    context: ClientContext,
    settings: LedgerSettings,
    *,
    id_min: int,
    unbounded: UnboundedRecord | None,
) -> tuple[LedgerMetadata, Digest, dict[str, BookieConnection | BookKeeperError]]:
    """Draw an id and find an ensemble.

    The ensemble may name bookies that are down (rule 9), but not with guaranteed write quorum.

    Returns:
        A new ledger's metadata, not written yet; its digest; the connections to its bookies, with an error
        for each bookie that is down.

    Raises:
        NotEnoughBookiesError: too few bookies can be reached.
    """
    context.check_open()
    ledger_id = await context.ledgers.allocate_id(at_least=id_min)
    sizes = Sizes(
        settings.ensemble_size,
        settings.write_quorum,
        settings.ack_quorum,
        settings.guaranteed_write_quorum,
    )
    found = await context.finder.find(ledger_id, sizes)
    record, proof = await context.lock(ledger_id, settings.password)
    metadata = LedgerMetadata.new(
        ledger_id,
        ensemble_size=settings.ensemble_size,
        write_quorum=settings.write_quorum,
        ack_quorum=settings.ack_quorum,
        bookies=found.bookies,
        digest=settings.digest,
        password=record,
        guaranteed_write_quorum=settings.guaranteed_write_quorum,
        created_ms=context.now_ms(),
        custom=settings.custom_metadata,
        unbounded=unbounded,
    )
    return metadata, proof, found.connections


async def start_writer(
    context: ClientContext, writer: Writer, connections: dict[str, BookieConnection | BookKeeperError]
) -> Writer:
    """Start a new writer, and register it with the client, which aborts it when the client is closed.

    If the start fails, the writer is aborted, and the error is raised.

    Args:
        connections: to the bookies of its ensemble, an error for a bookie that cannot be reached.
    """
    context.keep(writer)
    try:
        await writer.start(connections)
    except BaseException:
        await writer.abort()
        raise
    return writer
