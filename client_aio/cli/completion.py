"""What the shell completes: ids of ledgers, names of logs and unbounded ledgers, ids of bookies.

The metadata store is the one that the command line or the settings name. A store that does not answer in
time completes nothing. Nothing is printed, since the shell would take it for a candidate.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from itertools import islice
from typing import Any

import client_aio
from client_aio.cli.options import command_path, settings_of
from metadata.access.bookies import registered_bookies
from metadata.backends.uri import open_store
from metadata.errors import BookKeeperError
from metadata.store import MetadataStore

_TIMEOUT_S = 2.0
_CANDIDATES_MAX = 200

Candidates = Callable[[MetadataStore, str], Awaitable[list[str]]]


def _completing(candidates: Candidates) -> Callable[[Any, str], list[str]]:
    """Return an `autocompletion` function of typer: candidates that begin with what has been typed."""

    def complete(ctx: Any, incomplete: str) -> list[str]:
        found: list[str] = []
        with suppress(BookKeeperError, OSError, TimeoutError):
            named = settings_of(ctx).defaults_of(command_path(ctx), ["metadata"]).get("metadata")
            uri = ctx.params.get("metadata") or named
            if not uri:
                return []
            found = asyncio.run(_ask(uri, candidates, incomplete))
        given = ctx.params.get("names") or ctx.params.get("ledger_ids") or ()
        wanted = (one for one in found if one.startswith(incomplete) and one not in given)
        return list(islice(wanted, _CANDIDATES_MAX))

    return complete


async def _ask(uri: str, candidates: Candidates, incomplete: str) -> list[str]:
    async with asyncio.timeout(_TIMEOUT_S), await open_store(uri) as store:
        return await candidates(store, incomplete)


async def _beginning_with(items: AsyncGenerator[str, None], incomplete: str) -> list[str]:
    """Return the first items that begin so."""
    found: list[str] = []
    async with aclosing(items):
        async for item in items:
            if item.startswith(incomplete):
                found.append(item)
            if len(found) == _CANDIDATES_MAX:
                break
    return found


async def _logs(store: MetadataStore, incomplete: str) -> list[str]:
    async with client_aio.connect(store) as client:
        return await _beginning_with(client.list_logs(), incomplete)


async def _ids(client: "client_aio.Client") -> AsyncGenerator[str, None]:
    async with aclosing(client.list_ledgers()) as ledger_ids:
        async for ledger_id in ledger_ids:
            yield str(ledger_id)


async def _names(client: "client_aio.Client") -> AsyncGenerator[str, None]:
    async with aclosing(client.list_unbounded_ledgers()) as ledgers:
        async for name, _ in ledgers:
            yield name


async def _ledgers_and_names(store: MetadataStore, incomplete: str) -> list[str]:
    async with client_aio.connect(store) as client:
        named = await _beginning_with(_names(client), incomplete)
        return [*named, *await _beginning_with(_ids(client), incomplete)]


async def _bookies(store: MetadataStore, _: str) -> list[str]:
    return await registered_bookies(store)


complete_logs = _completing(_logs)
complete_ledgers_and_names = _completing(_ledgers_and_names)
complete_bookies = _completing(_bookies)
