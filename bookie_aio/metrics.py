"""Metrics of a bookie since its start: stages of an add, groups, requests; the table of all metrics. Pure.

Owns the names under which `bookie info` and a scrape show them. Does not own the gauges of connections
(`server.bookie`) and of segments (`storage.engine`), which it reads.

The stages of an add, each with its own histogram:

    receive        from the arrival of bytes to the end of handling the frames in them, once for each read
    queue          the longest wait of a record for its group, once for each group
    write, fsync   the system calls of a group
    commit         from the hand-over of a group to the disk to its return, with the hops between threads
    acknowledge    indexing a durable group and answering its adds, once for each group

`add_seconds` counts each entry, from the arrival of its last bytes to its group's return from the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from bookie_aio.wire.messages import Op
from metadata.metrics import BYTES, COUNTS, FINE_SECONDS, Histogram, check, counter, gauge, histogram, info

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from metadata.metrics import Metric


class StorageMetrics:
    """Counts of the storage engine: groups, their sizes, and the time that their stages take, in seconds."""

    def __init__(self) -> None:
        self.groups = 0
        self.group_records = Histogram(COUNTS)
        self.group_bytes = Histogram(BYTES)
        self.queue = Histogram()
        self.commit = Histogram()
        self.acknowledge = Histogram()
        self.durable_at = 0.0
        """When the last group came back from the disk, by the bookie's clock."""
        self.close_error = ""

    def count_group(
        self, records: int, size: int, *, queued_s: float, committed_s: float, durable_at: float
    ) -> None:
        """Count a group that became durable, before its records are acknowledged."""
        self.groups += 1
        self.group_records.add(records)
        self.group_bytes.add(size)
        self.queue.add(queued_s)
        self.commit.add(committed_s)
        self.durable_at = durable_at

    def as_dict(self) -> dict[str, object]:
        """Return the counts as JSON objects. Percentiles are upper bounds, within a factor of two."""
        groups, commit, count = self.group_bytes, self.commit, self.groups
        return {
            "groups": {
                "count": count,
                "records": round(self.group_records.total),
                "bytes": round(groups.total),
                "bytes_mean": round(groups.total) // max(1, count),
                "bytes_p50": round(groups.percentile(0.5)),
                "bytes_max": round(groups.highest),
            },
            "fsync_us": {
                "mean": round(commit.total / max(1, count) * 1e6),
                "p50": round(commit.percentile(0.5) * 1e6),
                "p99": round(commit.percentile(0.99) * 1e6),
                "max": round(commit.highest * 1e6),
            },
        }


class DiskTimes:
    """The time that the journal's system calls take. One thread at a time makes them, and counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns the time in seconds, from any thread."""
        self.clock = clock
        self.write = Histogram()
        self.fsync = Histogram()


class RequestMetrics:
    """Counts of requests, entries, bytes and refusals. `failures` counts by the name of the status."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns the time in seconds."""
        self.clock = clock
        self.requests = dict.fromkeys(map(int, Op), 0)
        self.entries_added = 0
        self.bytes_added = 0
        self.entries_repaired = 0
        self.bytes_read = 0
        self.refused_terms = 0
        self.fences = 0
        self.failures: dict[str, int] = {}
        self.receive = Histogram()
        self.add = Histogram(FINE_SECONDS)
        self.read = Histogram()

    def requests_by_name(self) -> dict[str, int]:
        """Return the number of requests by the name of their operation."""
        return {Op(op).name.lower(): count for op, count in self.requests.items()}

    def to_json(self) -> dict[str, object]:
        return {
            "requests": self.requests_by_name(),
            "entries_added": self.entries_added,
            "bytes_added": self.bytes_added,
            "entries_repaired": self.entries_repaired,
            "bytes_read": self.bytes_read,
            "refused_terms": self.refused_terms,
            "fences": self.fences,
            "failures": dict(self.failures),
        }


class HttpMetrics:
    """Counts of the HTTP endpoint, and the lag of the event loop, which the endpoint measures."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], int] = {}
        self.connections = 0
        self.closed: dict[str, int] = dict.fromkeys(("crowded", "late"), 0)
        self.loop_lag = Histogram()

    def count(self, path: str, status: int) -> None:
        """Count a request that was answered."""
        key = (path, str(status))
        self.requests[key] = self.requests.get(key, 0) + 1


class Figures(NamedTuple):
    """The source of a bookie's metrics: what INFO answers with, and what it leaves out."""

    info: Mapping[str, Any]
    requests: RequestMetrics
    storage: StorageMetrics
    disk: DiskTimes | None = None
    http: HttpMetrics | None = None

    @property
    def stored(self) -> Mapping[str, Any]:
        """Return the figures of the storage."""
        found: Mapping[str, Any] = self.info["storage"]
        return found

    @property
    def stages(self) -> dict[str, Histogram]:
        """Return the histogram of each stage of an add."""
        disk = {} if self.disk is None else {"write": self.disk.write, "fsync": self.disk.fsync}
        return {
            "receive": self.requests.receive,
            "queue": self.storage.queue,
            **disk,
            "commit": self.storage.commit,
            "acknowledge": self.storage.acknowledge,
        }

    @property
    def space(self) -> dict[str, int]:
        """Return the bytes that the bookie's segments take up, by what they are for."""
        segments, disk = self.stored["segments"], self.stored["disk"]
        return {
            "sealed": segments["bytes"] - segments["current_bytes"],
            "current": segments["current_bytes"],
            "spare": disk["spare_bytes"],
            "reserve": disk["reserve_bytes"],
        }


def _of(*path: str) -> Callable[[Figures], Any]:
    """Return what reads a figure of `info`, by its keys."""

    def read(figures: Figures) -> Any:
        found: Any = figures.info
        for key in path:
            found = found[key]
        return found

    return read


def _http(read: Callable[[HttpMetrics], Any]) -> Callable[[Figures], Any]:
    return lambda figures: None if figures.http is None else read(figures.http)


_IDENTITY = ("bookie_id", "instance_id", "incarnation", "nonce", "address")

METRICS: tuple[Metric, ...] = (
    info("bookie_aio_bookie_info", "The identity of the bookie.", lambda of: of.info, *_IDENTITY),
    gauge("bookie_aio_uptime_seconds", "seconds", "Time since the start.", _of("uptime_s")),
    gauge(
        "bookie_aio_writable", "", "1 where ordinary adds are taken, 0 where it is read-only.",
        lambda of: int(of.info["is_writable"]),
    ),
    gauge(
        "bookie_aio_ordered", "", "1 where an operator has ordered the bookie to take no entries.",
        lambda of: int(of.info["order"] is not None),
    ),
    # --- adds and reads
    histogram(
        "bookie_aio_add_seconds", "seconds",
        "Time of an entry from its arrival to its group's return from the disk.",
        lambda of: of.requests.add,
    ),
    histogram(
        "bookie_aio_add_stage_seconds", "seconds",
        "Time of one stage of an add: receive, queue, write, fsync, commit (hand-over to the disk and back), "
        "acknowledge.",
        lambda of: of.stages, "stage",
    ),
    histogram(
        "bookie_aio_group_bytes", "bytes", "Size of a group commit.", lambda of: of.storage.group_bytes
    ),
    histogram(
        "bookie_aio_group_records", "", "Records in a group commit.", lambda of: of.storage.group_records
    ),
    histogram(
        "bookie_aio_read_seconds", "seconds", "Time of a READ from its arrival to its answer.",
        lambda of: of.requests.read,
    ),
    counter(
        "bookie_aio_entries_added_total", "", "Entries that were made durable for writers and recoveries.",
        lambda of: of.requests.entries_added,
    ),
    counter(
        "bookie_aio_added_bytes_total", "bytes", "Bytes of blocks of these entries.",
        lambda of: of.requests.bytes_added,
    ),
    counter(
        "bookie_aio_entries_repaired_total", "", "Entries that repairs and write-backs stored.",
        lambda of: of.requests.entries_repaired,
    ),
    counter(
        "bookie_aio_read_bytes_total", "bytes", "Bytes of blocks that READ returned.",
        lambda of: of.requests.bytes_read,
    ),
    counter(
        "bookie_aio_requests_total", "", "Requests that were received; an ADDS counts as one.",
        lambda of: of.requests.requests_by_name(), "operation",
    ),
    counter(
        "bookie_aio_requests_refused_total", "", "Requests that were answered with a status other than OK.",
        lambda of: of.requests.failures, "status",
    ),
    counter(
        "bookie_aio_terms_refused_total", "", "Requests that were refused by a higher term.",
        lambda of: of.requests.refused_terms,
    ),
    counter("bookie_aio_fences_total", "", "Terms that requests raised.", lambda of: of.requests.fences),
    # --- work under way
    gauge("bookie_aio_adds_pending_bytes", "bytes", "Adds that are not durable yet.", _of("bytes_pending")),
    gauge(
        "bookie_aio_queue_records", "", "Records that wait for the group in flight.",
        _of("storage", "queue", "records"),
    ),
    gauge(
        "bookie_aio_queue_bytes", "bytes", "Bytes of records that wait, and of the group in flight.",
        _of("storage", "queue", "bytes"),
    ),
    gauge("bookie_aio_reads_running", "", "Reads that are being computed.", _of("reads_running")),
    gauge(
        "bookie_aio_reads_pending_bytes", "bytes", "Answers to reads that are computed or not yet sent.",
        _of("reads_bytes"),
    ),
    gauge("bookie_aio_polls_waiting", "", "Long polls that wait for a LAC.", _of("polls_waiting")),
    gauge("bookie_aio_ledgers_watched", "", "Ledgers that connections watch.", _of("ledgers_watched")),
    gauge("bookie_aio_connections", "", "Connections of clients.", _of("connections")),
    gauge("bookie_aio_connections_limit", "", "Connections above which a client is refused.",
          _of("connections_max")),
    gauge(
        "bookie_aio_connections_waiting", "", "Connections that wait for room or for their turn.",
        _of("connections_waiting"),
    ),
    gauge("bookie_aio_receive_buffers_bytes", "bytes", "Memory of receive buffers.", _of("received_bytes")),
    # --- space and segments
    gauge(
        "bookie_aio_segments", "", "Segments: sealed ones, and those that are not.",
        lambda of: {
            "sealed": of.stored["segments"]["sealed"],
            "open": of.stored["segments"]["count"] - of.stored["segments"]["sealed"],
        },
        "state",
    ),
    gauge(
        "bookie_aio_space_bytes", "bytes",
        "Space that the segments take up: sealed, current, spare files for reuse, and the reserve.",
        lambda of: of.space, "kind",
    ),
    gauge(
        "bookie_aio_live_bytes", "bytes", "Bytes of sealed segments that were live when last assessed.",
        _of("storage", "reclaimed", "live_bytes"),
    ),
    gauge(
        "bookie_aio_disk_free_bytes", "bytes", "Free space of the directory that has the least.",
        _of("storage", "disk", "free_bytes"),
    ),
    gauge(
        "bookie_aio_disk_size_bytes", "bytes", "Size of the file system of that directory.",
        _of("storage", "disk", "total_bytes"),
    ),
    gauge(
        "bookie_aio_disk_condition", "",
        "1 where it holds: full (no new segment), low (no ordinary adds), tight (a warning was logged).",
        lambda of: {one: int(of.stored["disk"][f"is_{one}"]) for one in ("full", "low", "tight")},
        "condition",
    ),
    counter(
        "bookie_aio_segments_given_up_total", "", "Segments whose space was given back.",
        _of("storage", "reclaimed", "given_up"),
    ),
    counter(
        "bookie_aio_segments_compacted_total", "", "Segments whose live entries were copied before that.",
        _of("storage", "reclaimed", "compacted"),
    ),
    counter(
        "bookie_aio_compaction_copied_bytes_total", "bytes", "Bytes of these copies.",
        _of("storage", "reclaimed", "copied_bytes"),
    ),
    gauge("bookie_aio_files_open", "", "Files of sealed segments and indexes that are open.",
          _of("storage", "segments", "open_files")),
    gauge("bookie_aio_index_cache_bytes", "bytes", "Memory of the heads of indexes, and of found locations.",
          lambda of: of.stored["segments"]["index_head_bytes"] + of.stored["segments"]["places_bytes"]),
    # --- damage
    counter(
        "bookie_aio_scrub_passes_total", "", "Passes of the scrubber.", _of("storage", "scrubbed", "passes")
    ),
    counter(
        "bookie_aio_scrub_read_bytes_total", "bytes", "Bytes that the scrubber has read.",
        _of("storage", "scrubbed", "bytes"),
    ),
    counter(
        "bookie_aio_scrub_findings_total", "",
        "Blocks that the scrubber found damaged, or that the disk did not return (unread).",
        lambda of: {one: of.stored["scrubbed"][one] for one in ("damaged", "unread")}, "finding",
    ),
    counter(
        "bookie_aio_read_findings_total", "", "The same, found by reads.",
        lambda of: {"damaged": of.stored["damaged_blocks"], "unread": of.stored["unread_blocks"]}, "finding",
    ),
    gauge("bookie_aio_ledgers", "", "Ledgers of which the bookie keeps a state.",
          _of("storage", "ledgers", "count")),
    gauge(
        "bookie_aio_ledgers_damaged", "", "Ledgers with a mark of lost data.",
        _of("storage", "ledgers", "damaged"),
    ),
    gauge(
        "bookie_aio_all_ledgers_marked", "", "1 where lost data may concern any ledger up to a bound.",
        lambda of: int(of.stored["ledgers"]["all_damaged"]),
    ),
    counter("bookie_aio_marks_lifted_total", "", "Marks that were lifted.", _of("marks_lifted")),
    # --- deletion and the metadata store
    counter(
        "bookie_aio_ledgers_dropped_total", "", "Ledgers that were deleted, evicted or trimmed.",
        lambda of: {
            "deleted": of.info["ledgers_dropped"],
            "evicted": of.info["ledgers_forgotten"],
            "trimmed": of.info["ledgers_trimmed"],
        },
        "reason",
    ),
    gauge("bookie_aio_tombstone_ranges", "", "Ranges of tombstoned ids.",
          _of("storage", "ledgers", "deleted_ranges")),
    gauge("bookie_aio_ledger_id_floor", "", "Lower ids are given to no ledger any more.",
          _of("ledger_id_floor")),
    gauge("bookie_aio_ledger_ids_given_out", "", "Ids below this one had been given out, as last read.",
          _of("ids_given_out")),
    gauge("bookie_aio_age", "", "The age of the bookie's directories.", _of("age")),
    gauge(
        "bookie_aio_metadata_set_back", "", "1 where the metadata store was set back, and not accepted.",
        lambda of: int(of.info["metadata_set_back"] is not None),
    ),
    # --- the process
    histogram(
        "bookie_aio_event_loop_lag_seconds", "seconds",
        "Delay of a timer of the event loop, measured four times a second. The timers are exact to 1 ms.",
        _http(lambda http: http.loop_lag),
    ),
    gauge("bookie_aio_http_connections", "", "HTTP connections.", _http(lambda http: http.connections)),
    counter(
        "bookie_aio_http_requests_total", "", "HTTP requests that were answered.",
        _http(lambda http: http.requests), "path", "status",
    ),
    counter(
        "bookie_aio_http_closed_total", "",
        "HTTP connections that were closed: too many of them (crowded), or no end in time (late).",
        _http(lambda http: http.closed), "reason",
    ),
)  # fmt: skip
"""All metrics of a bookie, in the order of the answer to a scrape."""

check(METRICS)
