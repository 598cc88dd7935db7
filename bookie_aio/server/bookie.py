"""A bookie: storage engine, listening socket and registration, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable
    from types import TracebackType

    from bookie_aio.config import BookieConfig
    from bookie_aio.storage.disk import Disk
    from metadata.errors import StorageError
    from metadata.store import MetadataStore


class Bookie:
    """A running bookie; made by `start`. Also a context manager that closes it."""

    bookie_id: str
    address: str
    """`host:port` listened on."""
    addresses: list[str]
    """What is advertised, best first."""
    nonce: str
    stopped: asyncio.Future[StorageError | None]
    """Fires when the bookie serves no more: with the error of a fail-stop (rule 2), or None once closed."""

    @classmethod
    async def start(
        cls,
        config: BookieConfig,
        store: MetadataStore,
        disk: Disk,
        *,
        rng: random.Random,
        now_ms: Callable[[], int],
    ) -> Self:
        """Check the identity, replay the storage, listen, register.

        Args:
            config: what to be; its checks have been made when it was built.
            store: stays the caller's to close, after the bookie.
            disk: where the data directories are.
            rng: source of nonces and incarnations; `random.SystemRandom()` outside simulations.
            now_ms: wall clock in milliseconds, for figures and the cluster's record only.

        Raises:
            CookieMismatchError: the directory belongs to another bookie or cluster, or was emptied (rule 6).
            DirectoryInUseError: another process has it open.
            KeyExistsError: a bookie of that id is running elsewhere.
            StorageError: the directory cannot be read or replayed.
            MetadataUnavailableError: the metadata store cannot be reached.
            OSError: the address cannot be listened on.
        """
        raise NotImplementedError

    def info(self) -> dict[str, object]:
        """Give the figures that INFO answers with."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop cleanly: accept nothing more, make durable what was accepted, answer it, deregister."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
