"""Making a ledger: its settings, and the steps from an id to a writer that has started.

Owns the check of the settings. Does not own the writers: an application's ledger and each ledger of a log are
made here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from client_aio.core.digest import check_choice
from client_aio.ledger.writer import LedgerWriter
from metadata.errors import InvalidArgumentError
from metadata.model.ledger import DIGESTS, LedgerMetadata, check_custom, check_quorums

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.model.ledger import UnboundedRecord
    from metadata.store import Version

Writer = TypeVar("Writer", bound=LedgerWriter)


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
        NotEnoughBookiesError: fewer than E bookies can be reached.
        MetadataUnavailableError: the ledger may exist, now or later. No client has its id.
    """
    metadata, proof = await new_metadata(context, settings, id_min=id_min)
    version = await context.ledgers.create_ledger(metadata, token=context.draw_token())
    return await start_writer(context, make(context, metadata, version, proof))


async def new_metadata(
    context: ClientContext,
    settings: LedgerSettings,
    *,
    id_min: int = 0,
    unbounded: UnboundedRecord | None = None,
) -> tuple[LedgerMetadata, Digest]:
    """Draw an id and find an ensemble; return a new ledger's metadata, not written yet, and its digest.

    Raises:
        NotEnoughBookiesError: fewer than E bookies can be reached.
    """
    context.check_open()
    ledger_id = await context.ledgers.allocate_id(at_least=id_min)
    bookies = await context.finder.find(
        ledger_id, ensemble_size=settings.ensemble_size, write_quorum=settings.write_quorum
    )
    record, proof = await context.lock(ledger_id, settings.password)
    metadata = LedgerMetadata.new(
        ledger_id,
        ensemble_size=settings.ensemble_size,
        write_quorum=settings.write_quorum,
        ack_quorum=settings.ack_quorum,
        bookies=bookies,
        digest=settings.digest,
        password=record,
        guaranteed_write_quorum=settings.guaranteed_write_quorum,
        created_ms=context.now_ms(),
        custom=settings.custom_metadata,
        unbounded=unbounded,
    )
    return metadata, proof


async def start_writer(context: ClientContext, writer: Writer) -> Writer:
    """Start a new writer, and register it with the client, which aborts it when the client is closed.

    If the start fails, the writer is aborted, and the error is raised.
    """
    context.keep(writer)
    try:
        await writer.start()
    except BaseException:
        await writer.abort()
        raise
    return writer
