"""Auto recovery in one process: a candidate for the auditor, and a worker.

    async with client_aio.connect(uri) as client:
        async with AutoRecovery(client, AutoRecoveryConfig(lost_bookie_delay_s=60)):
            await asyncio.Event().wait()

Every process of a cluster may run one. Closing the client ends it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Self

from client_aio.autorecovery.auditor import Auditor
from client_aio.autorecovery.worker import Worker
from client_aio.config import AutoRecoveryConfig
from metadata.errors import BookKeeperError, ClientClosedError, InvalidArgumentError
from metadata.ids import check_bookie_id
from metadata.owned_task import OwnedTask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from client_aio.client import Client

logger = logging.getLogger(__name__)

_RESTART_S = 1.0
_CONFIG = AutoRecoveryConfig()


class AutoRecovery:
    """An auditor's candidate and a worker. An async context manager: leaving it ends both."""

    def __init__(
        self,
        client: Client,
        config: AutoRecoveryConfig = _CONFIG,
        *,
        name: str = "",
        audits: bool = True,
        repairs: bool = True,
    ) -> None:
        """Prepare; nothing happens before it is entered.

        Args:
            client: copies with its connections and its placement policy. Its owner must close it.
            config: the settings.
            name: of this process, in `autorecovery status`; drawn if it is empty. No two may have the same.
            audits: whether it stands for election.
            repairs: whether it does tasks.

        Raises:
            InvalidArgumentError: the name is not legal, or there is nothing to do.
        """
        if not audits and not repairs:
            raise InvalidArgumentError("audits=False, repairs=False leaves nothing to do")
        self._context = client._context
        self._config = config
        self.name = check_bookie_id(name or f"r{self._context.draw_token()}")
        self._audits, self._repairs = audits, repairs
        self._jobs: list[OwnedTask] = []
        self.auditor: Auditor | None = None
        self.worker: Worker | None = None

    async def __aenter__(self) -> Self:
        self._context.check_open()
        if self._audits:
            self.auditor = Auditor(self._context, self._config, self.name)
            self._jobs.append(OwnedTask(partial(_for_ever, self.auditor.run), "auditor"))
        if self._repairs:
            self.worker = Worker(self._context, self._config, self.name)
            self._jobs.append(OwnedTask(partial(_for_ever, self.worker.run), "repair worker"))
        self._context.keep(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()

    async def abort(self) -> None:
        """End both. A repair under way leaves the ledger unchanged, or partly repaired."""
        self._context.forget(self)
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*(job.wait() for job in self._jobs))


async def _for_ever(run: Callable[[], Awaitable[None]]) -> None:
    """Run a job again whatever ends it, until the client is closed."""
    while True:
        try:
            await run()
        except ClientClosedError:
            return
        except BookKeeperError as error:
            logger.warning("auto recovery begins again: %s", error)
        except Exception:
            logger.exception("auto recovery begins again")
        await asyncio.sleep(_RESTART_S)
