"""Whether names on the command line are names of the cluster: a mistyped one is no empty answer."""

from typing import TYPE_CHECKING

from metadata.access.bookies import Orders, available_bookies, is_retired, registered_bookies
from metadata.errors import NoSuchKeyError
from metadata.store import MetadataStore

if TYPE_CHECKING:
    from client_aio import Client
    from client_aio.autorecovery.survey import LedgerFilter


async def check_bookie(store: MetadataStore, bookie: str) -> None:
    """Raise NoSuchKeyError for a bookie that neither has a cookie, nor runs, nor has an order."""
    known = {*await registered_bookies(store), *await available_bookies(store)}
    if bookie not in {*known, *(await Orders.read(store)).by_bookie}:
        has_left = " any more: it has left the cluster" if await is_retired(store, bookie) else ""
        raise NoSuchKeyError(
            f"there is no bookie {bookie}{has_left}; the cluster's are {', '.join(sorted(known)) or 'none'}"
        )


async def check_filter(client: "Client", wanted: "LedgerFilter") -> None:
    """Check the names in a filter that let no ledger through.

    Raises:
        NoSuchKeyError: there is no such bookie, and there was none.
        NoSuchLogError: there is no such log.
    """
    store = client._context.ledgers.store
    if wanted.bookie is not None and not await is_retired(store, wanted.bookie):
        await check_bookie(store, wanted.bookie)
    if wanted.log is not None:
        await client.log_metadata(wanted.log)
