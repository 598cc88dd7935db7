"""Metrics of clients in an application, for a registry of prometheus-client.

    import client_aio.metrics

    async with client_aio.connect(uri) as client:
        client_aio.metrics.register(client)
        prometheus_client.start_http_server(8000)

Owns the table of the metrics, and the collector that reads them at each scrape. The counts are those of the
client's parts (`client_aio.context`): a client that is not registered counts the same.

Several clients of a process are told apart by the label `client`. A client that is closed leaves the registry
by itself.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.registry import Collector

from client_aio.autorecovery.service import AutoRecovery
from client_aio.healing import WriterState
from client_aio.ledger.writer import LedgerWriter
from client_aio.log.ledger import LogLedger
from client_aio.log.writer import LogWriter
from client_aio.unbounded.writer import UnboundedLedgerWriter
from metadata.errors import InvalidArgumentError
from metadata.metrics import check, counter, families, gauge, histogram
from metadata.store import MeasuredStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client.metrics_core import Metric as Family

    from client_aio.autorecovery.auditor import Auditor
    from client_aio.autorecovery.worker import Worker
    from client_aio.client import Client
    from client_aio.context import ClientCounters
    from metadata.metrics import Metric


def _counters(read: Callable[[ClientCounters], Any]) -> Callable[[Client], Any]:
    return lambda client: read(client._context.counters)


def _store(client: Client) -> MeasuredStore:
    store = client._context.ledgers.store
    assert isinstance(store, MeasuredStore)
    return store


def _ledger_writers(client: Client) -> list[LedgerWriter]:
    """Return the open writers of ledgers, those that belong to logs too."""
    return [one for one in list(client._context.handles) if isinstance(one, LedgerWriter)]


def _bytes_in_flight(client: Client) -> int:
    logs = [one for one in list(client._context.handles) if isinstance(one, LogWriter)]
    held = sum(one.bytes_in_flight - one.current.bytes_in_flight for one in logs)
    return held + sum(one.bytes_in_flight for one in _ledger_writers(client))


def _writers(client: Client) -> dict[tuple[str, ...], int]:
    """Return how many writers there are, by kind and state."""
    found: Counter[tuple[str, ...]] = Counter()
    for kind in ("ledger", "unbounded", "log"):
        for state in WriterState:
            found[kind, state.value] = 0
    for one in list(client._context.handles):
        if isinstance(one, LogWriter):
            found["log", one.state.value] += 1
        elif isinstance(one, UnboundedLedgerWriter):
            found["unbounded", one.state.value] += 1
        elif isinstance(one, LedgerWriter) and not isinstance(one, LogLedger):
            state = WriterState.CLOSED if one.is_closed else WriterState.WRITING
            found["ledger", state.value] += 1
    return dict(found)


def _bookies(client: Client) -> dict[str, int]:
    running = client.bookies.values()
    return {
        "writable": sum(one.is_writable for one in running),
        "read-only": sum(not one.is_writable for one in running),
        "quarantined": len(client.quarantined_bookies),
    }


CLIENT_METRICS: tuple[Metric, ...] = (
    histogram(
        "bookie_aio_client_add_seconds", "seconds",
        "Time of an entry from its add to its acknowledgement, within one ledger or term.",
        _counters(lambda of: of.add),
    ),
    counter(
        "bookie_aio_client_added_bytes_total", "bytes", "Payload of the entries that were acknowledged.",
        _counters(lambda of: of.bytes_added),
    ),
    gauge(
        "bookie_aio_client_adds_in_flight", "", "Entries that are not acknowledged yet.",
        lambda client: sum(one.last_add_pushed - one.last_add_confirmed for one in _ledger_writers(client)),
    ),
    gauge(
        "bookie_aio_client_in_flight_bytes", "bytes",
        "Bytes of these, with the overhead of each entry, and of those that a healing writer holds.",
        _bytes_in_flight,
    ),
    gauge(
        "bookie_aio_client_writers", "", "Open writers of ledgers, unbounded ledgers and logs, by state.",
        _writers, "kind", "state",
    ),
    counter(
        "bookie_aio_client_seats_failed_total", "", "Bookies that failed in an ensemble that was written to.",
        _counters(lambda of: of.seats_failed),
    ),
    counter(
        "bookie_aio_client_ensemble_changes_total", "", "Ensemble changes and rolls of fragments.",
        _counters(lambda of: of.ensemble_changes),
    ),
    counter(
        "bookie_aio_client_recoveries_total", "", "Recoveries and takeovers that began, by how they ended.",
        _counters(lambda of: of.recoveries), "outcome",
    ),
    counter(
        "bookie_aio_client_digest_mismatches_total", "",
        "Answers to reads that were damaged, forged, or not what was asked for.",
        _counters(lambda of: of.digest_mismatches),
    ),
    gauge(
        "bookie_aio_client_tails", "", "Readers that follow a ledger.",
        lambda client: len(client._context.tails.lags()),
    ),
    gauge(
        "bookie_aio_client_tail_lag_entries", "",
        "Entries up to the LAC that the reader furthest behind has not been given.",
        lambda client: max(client._context.tails.lags(), default=0),
    ),
    gauge(
        "bookie_aio_client_bookies", "", "Bookies that are registered, and those that failed lately.",
        _bookies, "state",
    ),
    histogram(
        "bookie_aio_client_metadata_seconds", "seconds", "Time of an operation of the metadata store.",
        lambda client: _store(client).times, "operation",
    ),
    counter(
        "bookie_aio_client_metadata_failures_total", "",
        "Operations that ended with an error; a conflict or a missing key is one.",
        lambda client: _store(client).failures, "operation",
    ),
)  # fmt: skip


def _recovery(client: Client) -> AutoRecovery | None:
    return next((one for one in list(client._context.handles) if isinstance(one, AutoRecovery)), None)


def _worker(read: Callable[[Worker], Any]) -> Callable[[Client], Any]:
    def of(client: Client) -> Any:
        recovery = _recovery(client)
        return None if recovery is None or recovery.worker is None else read(recovery.worker)

    return of


def _auditor(read: Callable[[Auditor], Any]) -> Callable[[Client], Any]:
    """Return what reads an auditor that is elected. One that is not knows nothing of the cluster."""

    def of(client: Client) -> Any:
        recovery = _recovery(client)
        auditor = None if recovery is None else recovery.auditor
        return None if auditor is None or not auditor.is_elected else read(auditor)

    return of


def _is_auditor(client: Client) -> int | None:
    recovery = _recovery(client)
    return None if recovery is None or recovery.auditor is None else int(recovery.auditor.is_elected)


AUTO_RECOVERY_METRICS: tuple[Metric, ...] = (
    gauge("bookie_aio_autorecovery_auditor", "", "1 where this process is the auditor.", _is_auditor),
    gauge(
        "bookie_aio_autorecovery_tasks", "",
        "Ledgers that wait for a repair, as the auditor knows: with a task (listed), and with none now "
        "(waiting). Those of a decommission, and those to be spread over racks, count, too.",
        _auditor(lambda of: {"listed": of.tasks_known, "waiting": of.record.waiting}), "state",
    ),
    gauge(
        "bookie_aio_autorecovery_bookies_lost", "",
        "Bookies that are gone for longer than the delay. One that has left the cluster may count, too.",
        _auditor(lambda of: len(of.record.lost)),
    ),
    counter(
        "bookie_aio_autorecovery_passes_total", "", "Passes over all metadata of this auditor.",
        _auditor(lambda of: of.record.passes),
    ),
    gauge(
        "bookie_aio_autorecovery_pass_seconds", "seconds", "Time of the last pass.",
        _auditor(lambda of: of.record.pass_s),
    ),
    counter(
        "bookie_aio_autorecovery_ledgers_checked_total", "",
        "Ledgers whose copies this auditor compared with what is owed.",
        _auditor(lambda of: of.record.checked),
    ),
    gauge(
        "bookie_aio_autorecovery_ledgers", "", "Ledgers of the cluster: all, open ones, unreadable ones.",
        _auditor(
            lambda of: {
                "all": of.record.ledgers,
                "open": of.record.ledgers_open,
                "unreadable": of.record.ledgers_unreadable,
            }
        ),
        "state",
    ),
    gauge(
        "bookie_aio_autorecovery_repairs_running", "", "Ledgers that the worker of this process repairs now.",
        _worker(lambda of: int(of.record.ledger_id is not None)),
    ),
    gauge(
        "bookie_aio_autorecovery_tasks_resting", "", "Tasks that the worker tries again later.",
        _worker(lambda of: of.tasks_resting),
    ),
    counter(
        "bookie_aio_autorecovery_ledgers_repaired_total", "", "Tasks that the worker has done.",
        _worker(lambda of: of.record.repaired),
    ),
    counter(
        "bookie_aio_autorecovery_attempts_failed_total", "", "Attempts of the worker that failed.",
        _worker(lambda of: of.record.failed),
    ),
    counter(
        "bookie_aio_autorecovery_read_bytes_total", "bytes",
        "Bytes that the worker read, to copy and to verify: each byte copied counts twice.",
        _worker(lambda of: of.record.bytes_read),
    ),
    counter(
        "bookie_aio_autorecovery_busy_seconds_total", "seconds", "Time in which the worker repaired.",
        _worker(lambda of: of.record.busy_s),
    ),
)  # fmt: skip

METRICS = CLIENT_METRICS + AUTO_RECOVERY_METRICS

check(METRICS)


def families_of(clients: Mapping[str, Client], metrics: Iterable[Metric] = METRICS) -> Iterable[Family]:
    """Yield the metrics of clients, by the value of the label `client`."""
    yield from families(metrics, clients, "client")


class _Clients(Collector):
    """The clients that are registered with one registry."""

    def __init__(self) -> None:
        self._clients: WeakValueDictionary[str, Client] = WeakValueDictionary()

    def add(self, name: str, client: Client) -> None:
        if self._open().get(name, client) is not client:
            raise InvalidArgumentError(f"a client {name!r} is registered already: give another name")
        self._clients[name] = client

    def _open(self) -> dict[str, Client]:
        return {name: client for name, client in list(self._clients.items()) if not client.is_closed}

    def collect(self) -> Iterable[Family]:
        """Return the metrics of the clients that are open."""
        return families_of(self._open())


_of_registry: WeakKeyDictionary[CollectorRegistry, _Clients] = WeakKeyDictionary()


def register(client: Client, *, name: str = "", registry: CollectorRegistry | None = None) -> None:
    """Have a registry collect the metrics of a client, until the client is closed.

    The metrics are read when the registry is scraped, perhaps in another thread. Nothing is awaited for them.

    Args:
        name: the value of the label `client`.
        registry: None stands for the default registry of prometheus-client.

    Raises:
        InvalidArgumentError: another open client is registered there under the same name.
        ValueError: the registry has metrics of the same names that are not ours.
    """
    where = registry if registry is not None else REGISTRY
    clients = _of_registry.get(where)
    if clients is None:
        clients = _Clients()
        where.register(clients)
        _of_registry[where] = clients
    clients.add(name, client)
