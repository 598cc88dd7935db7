"""HTML and SVG from values: escaping, numbers for people, small charts. Pure.

Invariant: text becomes markup in `html` only, which escapes every value that is no `Html`. Control characters
and bidi controls are escaped first, as everywhere in this project (`metadata.text`).

The Content-Security-Policy of the server allows no inline style. So charts use attributes and classes.
"""

from __future__ import annotations

import math
from html import escape as escape_html
from itertools import groupby, pairwise
from string import Formatter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from metadata.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from metadata.model.ledger import Fragment


class Html(str):
    """Markup that is safe to send."""

    __slots__ = ()


class _Escaping(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Html):
            return str(value)
        return escape_html(escape(format(value, format_spec)))


_formatter = _Escaping()


def html(template: str, *values: object, **named: object) -> Html:
    """Return markup from a template in the form of `str.format`. All values but `Html` are escaped."""
    return Html(_formatter.vformat(template, values, named))


def joined(parts: Iterable[Html], between: str = "") -> Html:
    """Return several pieces of markup as one."""
    return Html(between.join(parts))


def link(path: str, text: object, **query: object) -> Html:
    """Return a link within the page."""
    return html('<a href="{}">{}</a>', url(path, **query), text)


def url(path: str, **query: object) -> str:
    """Return a path with a query; empty values are left out."""
    kept = {key: value for key, value in query.items() if value not in ("", None, False)}
    return f"{path}?{urlencode(kept)}" if kept else path


# --- numbers ------------------------------------------------------------------------------------------

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def bytes_text(count: float | None) -> str:
    """Return a number of bytes in the largest fitting binary unit."""
    if count is None:
        return "–"
    power = min(int(math.log2(count) // 10) if count >= 1 else 0, len(_UNITS) - 1)
    value = count / 1024**power
    return f"{value:.0f} {_UNITS[power]}" if power == 0 or value >= 100 else f"{value:.1f} {_UNITS[power]}"


def rate_text(count: float | None) -> str:
    """Return a number per second with three digits."""
    if count is None:
        return "–"
    units = ((1e6, "M"), (1e3, "k"), (1.0, ""))
    limit, unit = next((one for one in units if count >= one[0] * 0.9995), units[-1])
    value = count / limit
    return f"{value:,.0f}{unit}/s" if value >= 99.95 else f"{value:.3g}{unit}/s"


def seconds_text(seconds: float | None) -> str:
    """Return a short time: "840 µs", "3.2 ms", "1.5 s"."""
    if seconds is None:
        return "–"
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= limit:
            value = seconds / limit
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.2g} {unit}"
    return "0 s"


def duration_text(seconds: float | None) -> str:
    """Return a long time in its two largest units: "2 d 3 h", "4 min 5 s"."""
    if seconds is None:
        return "–"
    parts: list[str] = []
    left = int(max(seconds, 0.0))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count:,} {unit}")
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts)


def clock_text(at: float) -> str:
    """Return the time of day of a wall clock, in UTC."""
    second = int(at) % 86_400
    return f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"


def range_text(first: int, last: int | None) -> str:
    """Return a run of entries."""
    if last is None:
        return f"{first:,} –"
    return f"{first:,} – {last:,}" if last >= first else "none"


# --- charts -------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 120, 28


def sparkline(values: Sequence[float | None], label: str, points: int) -> Html:
    """Draw a curve from 0 to its highest value; gaps where there is no value. The newest is at the right.

    Args:
        label: what a screen reader says instead.
        points: how many values the whole width has room for.
    """
    known = [value for value in values if value is not None]
    top = max(known, default=0.0) or 1.0
    step = _WIDTH / max(points - 1, 1)
    start = _WIDTH - step * (len(values) - 1)
    lines = []
    placed = [
        (
            value is not None,
            f"{start + step * index:.0f},{_HEIGHT - 2 - (value or 0.0) / top * (_HEIGHT - 4):.0f}",
        )
        for index, value in enumerate(values)
    ]
    for is_known, run in groupby(placed, key=lambda one: one[0]):
        at = [point for _, point in run]
        if is_known:
            at = at if len(at) > 1 else [at[0], at[0]]
            lines.append(html('<polyline points="{}"/>', " ".join(at)))
    return html(
        '<svg class="spark" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        "{}</svg>",
        _WIDTH,
        _HEIGHT,
        label,
        joined(lines),
    )


def bar(share: float, label: str, kind: str = "") -> Html:
    """Draw a horizontal bar that is filled up to a share from 0 to 1."""
    return html(
        '<svg class="bar {}" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="rail" width="100" height="8"/><rect class="fill" width="{:.1f}" height="8"/></svg>',
        kind,
        label,
        min(max(share, 0.0), 1.0) * 100,
    )


_STRIP_WIDTH = 1000
_CELL_MIN = 8


def strip_widths(fragments: Sequence[Fragment], last_entry: int | None) -> list[tuple[int, int]]:
    """Return where each fragment begins and ends in a strip that is 1,000 wide.

    Widths go by entries. A short fragment is drawn 8 wide, so that it can be seen. A last fragment without a
    known end gets a sixth of the strip.
    """
    starts = [one.first_entry for one in fragments]
    ends = [*starts[1:], (last_entry if last_entry is not None else starts[-1] - 1) + 1]
    sizes = [float(max(end - start, 0)) for start, end in zip(starts, ends, strict=True)]
    if last_entry is None:
        sizes[-1] = max(sum(sizes[:-1]) / 5, 1.0)
    cell_min = min(_CELL_MIN, _STRIP_WIDTH / len(sizes))
    total = sum(sizes) or 1.0
    widths = [max(size / total * _STRIP_WIDTH, cell_min) for size in sizes]
    scale = _STRIP_WIDTH / sum(widths)
    edges = [0.0]
    for width in widths:
        edges.append(edges[-1] + width * scale)
    return [(round(start), max(round(end), round(start) + 1)) for start, end in pairwise(edges)]
