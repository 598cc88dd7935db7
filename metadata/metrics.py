"""Metrics: histograms that are cheap to count, the description of a metric, and the form for Prometheus.

A `Metric` is one row of a table: name, kind, unit, help, and how its value is read from a source. Each table
is the only list of its metrics. The answer to a scrape and docs/METRICS.md are both made from it.

Nothing is computed for a scrape before it comes. The code that is measured increments plain integers and
lists. Only this module knows prometheus-client, which it imports when something is scraped.

Names and units follow the conventions of Prometheus: base units (seconds, bytes) at the end of the name, and
`_total` behind those of a counter. `check` holds a table to that.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the text that `render` returns."""


def geometric(lowest: float, highest: float, ratio: float) -> tuple[float, ...]:
    """Return bounds from `lowest` to `highest` or just above, each larger by `ratio` than the one before."""
    steps = math.ceil(math.log(highest / lowest) / math.log(ratio) - 1e-9)
    return tuple(float(f"{lowest * ratio**step:.5g}") for step in range(steps + 1))


FINE_SECONDS = geometric(1e-4, 10.0, 1.1)
"""122 bounds, 10 % apart from 0.1 ms to 10 s: a percentile is right within 10 %. For few histograms."""
SECONDS = geometric(1e-5, 10.0, 10 ** (1 / 4))
"""Bounds 78 % apart from 10 µs to 10 s: enough to tell which stage takes the time. 25 buckets.

A scrape costs some 4 µs of a processor for each bucket."""
BYTES = tuple(float(1 << bits) for bits in range(8, 24))
"""Bounds that are powers of two from 256 bytes to 8 MiB."""
COUNTS = tuple(float(1 << bits) for bits in range(15))
"""Bounds that are powers of two from 1 to 16,384."""


class Histogram:
    """Counts of values in buckets with fixed upper bounds. A value that equals a bound is below it.

    Hot paths increment `counts` and `total` themselves: a call costs as much as the rest.
    """

    __slots__ = ("bounds", "counts", "highest", "total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last bucket has no bound
        self.total = 0.0
        self.highest = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count
        if value > self.highest:
            self.highest = value

    @property
    def count(self) -> int:
        """Return the number of values."""
        return sum(self.counts)

    def percentile(self, share: float) -> float:
        """Return the upper bound of the bucket in which that share of the values is reached; 0 for none.

        It is at most the highest value that was counted by `add`.
        """
        count = self.count
        for bound, reached in zip((*self.bounds, math.inf), accumulate(self.counts), strict=True):
            if count and reached >= share * count:
                return min(bound, self.highest) if self.highest else bound
        return 0.0


class Kind(enum.StrEnum):
    """The kind of a metric."""

    COUNTER = "counter"
    """A number that only grows, from 0 at the start of the process."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"
    """Texts, as the labels of a metric whose value is 1."""


UNITS = ("seconds", "bytes", "")
Value = float | Histogram
Read = Callable[[Any], Any]
"""Returns one value, or a mapping with one for each value of the labels. None: there is nothing to tell."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of a table of metrics.

    `labels` name the keys of what `read` returns: texts where there is one label, tuples of texts otherwise.
    For an INFO, `read` returns the texts by label.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    read: Read
    labels: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ValueError unless the name and the help are as the conventions say."""
        base = self.name.removesuffix("_total")
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters end with _total, and nothing else does")
        if self.unit not in UNITS or (self.unit and not base.endswith(f"_{self.unit}")):
            raise ValueError(f"{self.name} does not end with its unit {self.unit!r}")
        if not self.unit and base.endswith(("_seconds", "_bytes", "_ms", "_us")):
            raise ValueError(f"{self.name} ends with a unit, and states none")
        if not self.help.endswith(".") or self.help[0].islower():
            raise ValueError(f"the help of {self.name} is no sentence: {self.help!r}")


def counter(name: str, unit: str, text: str, read: Read, *labels: str) -> Metric:
    """Describe a counter."""
    return Metric(name, Kind.COUNTER, unit, text, read, labels)


def gauge(name: str, unit: str, text: str, read: Read, *labels: str) -> Metric:
    """Describe a gauge."""
    return Metric(name, Kind.GAUGE, unit, text, read, labels)


def histogram(name: str, unit: str, text: str, read: Read, *labels: str) -> Metric:
    """Describe a histogram."""
    return Metric(name, Kind.HISTOGRAM, unit, text, read, labels)


def info(name: str, text: str, read: Read, *labels: str) -> Metric:
    """Describe texts that do not change while the process lives."""
    return Metric(name, Kind.INFO, "", text, read, labels)


def check(metrics: Sequence[Metric]) -> None:
    """Raise ValueError unless every row is as the conventions say, and no two have the same name."""
    for metric in metrics:
        metric.check()
    names = [metric.name for metric in metrics]
    if len(set(names)) != len(names):
        raise ValueError(f"two metrics have the same name: {sorted(names)}")


# --- for Prometheus ---------------------------------------------------------------------------------


def _values(metric: Metric, source: Any) -> Iterator[tuple[tuple[str, ...], Value]]:
    reading = metric.read(source)
    if reading is None:
        return
    if metric.kind is Kind.INFO:
        yield tuple(str(reading[label]) for label in metric.labels), 1.0
    elif isinstance(reading, Mapping):
        for key, value in reading.items():
            yield (key if isinstance(key, tuple) else (key,)), value
    else:
        yield (), reading


def _buckets(value: Histogram) -> list[tuple[str, float]]:
    reached = accumulate(value.counts)
    return [
        *zip(_bound_texts(value.bounds), reached, strict=False),
        ("+Inf", float(value.count)),
    ]


_texts: dict[tuple[float, ...], list[str]] = {}


def _bound_texts(bounds: tuple[float, ...]) -> list[str]:
    found = _texts.get(bounds)
    if found is None:
        found = _texts[bounds] = [f"{bound:.12g}" for bound in bounds]
    return found


def families(metrics: Iterable[Metric], sources: Mapping[str, Any], label: str = "") -> Iterator[Family]:
    """Yield the metrics of some sources, as prometheus-client has them.

    Args:
        metrics: the table.
        sources: what the values are read from, by name.
        label: the name of the label that tells the sources apart; "" for one source.
    """
    from prometheus_client import core

    for metric in metrics:
        labels = [*((label,) if label else ()), *metric.labels]
        name, text = metric.name, metric.help
        family: Any
        if metric.kind is Kind.COUNTER:
            family = core.CounterMetricFamily(name, text, labels=labels)
        elif metric.kind is Kind.HISTOGRAM:
            family = core.HistogramMetricFamily(name, text, labels=labels)
        else:
            family = core.GaugeMetricFamily(name, text, labels=labels)
        for source_name, source in sources.items():
            before = (source_name,) if label else ()
            for key, value in _values(metric, source):
                if isinstance(value, Histogram):
                    family.add_metric([*before, *key], _buckets(value), value.total)
                else:
                    family.add_metric([*before, *key], value)
        yield family


class _One:
    """A registry of one family."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> list[Family]:
        return [self._family]


def render(family: Family) -> bytes:
    """Return one family in the text format. The texts of several may be joined."""
    from prometheus_client import generate_latest

    return generate_latest(_One(family))


def of_process() -> Iterable[Family]:
    """Return the metrics of this process: processor time, memory, descriptors."""
    from prometheus_client import ProcessCollector

    return ProcessCollector(registry=None).collect()


# --- for people -------------------------------------------------------------------------------------


def document(metrics: Iterable[Metric]) -> str:
    """Return the rows of a table in Markdown, for docs/METRICS.md."""
    lines = ["| metric | kind | unit | labels | what it tells |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
