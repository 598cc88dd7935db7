"""`bookie-aio top`: a cluster in a terminal, refreshed each second; elsewhere plain text or JSON.

Asks every bookie for its figures (INFO) at each refresh. The survey of `cluster status` reads the metadata of
every ledger, so it runs beside that, and rests ten times as long as it took. It may be minutes old, and its
age is shown. No cluster is called healthy in which a bookie has gone since, or whose last survey failed.

`Sample`, `rows_of` and `Screen` are pure; `_look` and `_Surveyor` ask.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from client_aio.autorecovery.survey import ClusterSurvey, figures_of, survey
from client_aio.cli.options import Invocation, command, stop_event
from client_aio.cli.output import Output
from client_aio.config import MIB
from client_aio.core.audit import Condition
from metadata.access.bookies import registered_bookies
from metadata.errors import BookKeeperError
from metadata.ids import MALFORMED
from metadata.text import escape

if TYPE_CHECKING:
    from rich.console import RenderableType

    from client_aio.context import ClientContext

app = typer.Typer()

_INFO_TIMEOUT_S = 3.0
_SURVEY_REST = 10.0
_SURVEY_PAUSE_S = 5.0
_PROBLEMS_MAX = 6
COLUMNS = (
    "bookie", "state", "adds_s", "mib_in_s", "mib_out_s", "fsync_p99_ms", "queue_kib", "connections",
    "free_gib", "ledgers",
)  # fmt: skip
_GONE = ("down", "silent")
_NARROW = ("bookie", "state", "adds_s", "fsync_p99_ms")
_WIDE_FROM = 115
"""The least width in which all columns have room."""


@dataclass
class Sample:
    """The bookies at one moment."""

    at: float
    """The time in seconds, by any clock that does not jump."""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What INFO answers, by bookie."""
    states: dict[str, str] = field(default_factory=dict)
    """Of each bookie of the cluster: "writable", "read-only", "silent" or "down"."""
    error: str = ""
    """Why there is no newer sample."""


@dataclass
class Row:
    """One bookie of the screen; None for a figure that is not known (yet)."""

    bookie: str
    state: str
    adds_s: float | None = None
    mib_in_s: float | None = None
    mib_out_s: float | None = None
    fsync_p99_ms: float | None = None
    """Of commits, since the bookie's start."""
    queue_kib: float | None = None
    connections: int | None = None
    free_gib: float | None = None
    ledgers: int | None = None


def rows_of(before: Sample | None, now: Sample) -> list[Row]:
    """Return a row for each bookie. Rates are those between two samples of the same run of a bookie."""
    rows = []
    for name, state in sorted(now.states.items()):
        figures = now.figures.get(name)
        if figures is None:
            rows.append(Row(name, state))
            continue
        stored = figures["storage"]
        row = Row(
            name,
            state,
            fsync_p99_ms=stored["fsync_us"]["p99"] / 1000,
            queue_kib=stored["queue"]["bytes"] / 1024,
            connections=figures["connections"],
            free_gib=stored["disk"]["free_bytes"] / 2**30,
            ledgers=stored["ledgers"]["count"],
        )
        earlier = None if before is None else before.figures.get(name)
        if before is not None and earlier is not None and earlier["nonce"] == figures["nonce"]:
            passed, old, new = now.at - before.at, earlier["counters"], figures["counters"]
            if passed > 0:
                row.adds_s = (new["entries_added"] - old["entries_added"]) / passed
                row.mib_in_s = (new["bytes_added"] - old["bytes_added"]) / passed / MIB
                row.mib_out_s = (new["bytes_read"] - old["bytes_read"]) / passed / MIB
        rows.append(row)
    return rows


@dataclass
class Screen:
    """All that is shown at once."""

    rows: list[Row]
    cluster: ClusterSurvey | None
    """The last survey that succeeded; None before the first one."""
    error: str = ""
    age_s: float | None = None
    """The time since that survey began; None before the first one."""
    survey_error: str = ""
    """Why the last survey failed, if it did."""

    @property
    def condition(self) -> Condition | None:
        """Return the worst condition that is known; None where it may be worse than healthy."""
        known = Condition.HEALTHY if self.cluster is None else self.cluster.condition
        if any(row.state in _GONE for row in self.rows):
            known = max(known, Condition.DEGRADED)
        is_sure = self.cluster is not None and not self.error and not self.survey_error
        return known if is_sure or known > Condition.HEALTHY else None

    def problems(self) -> list[str]:
        """Return what is wrong: what the survey found, and the bookies that have gone since."""
        found = [] if self.cluster is None else [problem.text for problem in self.cluster.problems]
        surveyed = {} if self.cluster is None else {one.bookie_id: one.state for one in self.cluster.bookies}
        gone = [row for row in self.rows if row.state in _GONE and row.state != surveyed.get(row.bookie)]
        return [*(f"bookie {row.bookie} is {row.state}, and no survey has seen it" for row in gone), *found]

    def heading(self) -> list[str]:
        """Return the lines above the table: the condition, problems, ledgers and repairs."""
        known = [row for row in self.rows if row.adds_s is not None]
        total = f"{sum(row.adds_s or 0.0 for row in known):,.0f} copies of entries a second" if known else ""
        if self.error:
            return [f"no answer: {self.error}"]
        unknown = "unknown" if self.survey_error else "looking"
        condition = unknown if self.condition is None else self.condition.label
        texts = self.problems()
        problems = [f"  {text}" for text in texts[:_PROBLEMS_MAX]]
        if len(texts) > _PROBLEMS_MAX:
            problems.append(f"  and {len(texts) - _PROBLEMS_MAX} more: `cluster status`")
        return ["; ".join(filter(None, (condition, total, self._survey()))), *problems, *self._ledgers()]

    def _survey(self) -> str:
        """Return how far the survey can be trusted."""
        age = "" if self.age_s is None else f"surveyed {self.age_s:,.0f} s ago"
        if self.survey_error:
            return f"the survey failed: {self.survey_error}" + (f" ({age})" if age else "")
        return age or "the survey of all ledgers is under way"

    def _ledgers(self) -> list[str]:
        if self.cluster is None:
            return []
        states = ", ".join(f"{count:,} {state}" for state, count in self.cluster.ledgers.items()) or "none"
        recovery = self.cluster.auto_recovery
        return [
            f"ledgers: {states}; {len(recovery.refs):,} wait for a repair, {len(recovery.workers)} workers"
            f"{', paused' if recovery.is_paused else ''}"
        ]

    def document(self) -> dict[str, Any]:
        """Return it as one JSON object."""
        return {
            "condition": None if self.condition is None else self.condition.label,
            "problems": self.problems(),
            "ledgers": {} if self.cluster is None else self.cluster.ledgers,
            "tasks": None if self.cluster is None else len(self.cluster.auto_recovery.refs),
            "survey_age_s": None if self.age_s is None else round(self.age_s, 1),
            "survey_error": self.survey_error or None,
            "bookies": [asdict(row) for row in self.rows],
            "error": self.error or None,
        }

    def renderable(self, width: int) -> "RenderableType":
        """Return it for rich, in a terminal of so many columns."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        columns = COLUMNS if width >= _WIDE_FROM else _NARROW
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in columns:
            is_text = name in ("bookie", "state")
            table.add_column(
                name.replace("_", " "),
                justify="left" if is_text else "right",
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in self.rows:
            style = {"down": "bold red", "silent": "bold red", "read-only": "yellow"}.get(row.state, "")
            table.add_row(*(Text(_cell(getattr(row, name)), style=style) for name in columns))
        is_well = not (self.error or self.survey_error or self.problems())
        first, *more = self.heading()
        lines = [Text(escape(first), style="bold green" if is_well else "bold red")]
        return Group(*lines, *(Text(escape(line), overflow="ellipsis", no_wrap=True) for line in more), table)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


# --- looking ------------------------------------------------------------------------------------------


async def _look(context: "ClientContext") -> Sample:
    """Ask every bookie. Raises MetadataUnavailableError where the store does not answer."""
    directory = context.pool.directory
    await directory.refresh()
    running = directory.available
    known = {*await registered_bookies(context.ledgers.store), *running}
    sample = Sample(time.monotonic(), states=dict.fromkeys(known, "down"))

    async def ask(name: str) -> None:
        sample.states[name] = "writable" if running[name].is_writable else "read-only"
        try:
            sample.figures[name] = await figures_of(context, name, _INFO_TIMEOUT_S)
        except (BookKeeperError, *MALFORMED):
            sample.states[name] = "silent"

    await asyncio.gather(*map(ask, running))
    return sample


class _Surveyor:
    """Surveys the cluster again and again; the last result stays, with its age and the failure since."""

    def __init__(self, context: "ClientContext") -> None:
        self._context = context
        self._last: ClusterSurvey | None = None
        self._last_at = 0.0
        self._error = ""

    def screen(self, rows: list[Row], error: str) -> Screen:
        """Return the screen of these rows, with what is known of the cluster now."""
        age_s = None if self._last is None else time.monotonic() - self._last_at
        return Screen(rows, self._last, error, age_s, self._error)

    async def run(self) -> None:
        """Survey for ever. Raises the error of a bug, which is none of the cluster."""
        while True:
            begin = time.monotonic()
            try:
                self._last = await survey(self._context)
            except BookKeeperError as error:
                self._error = " ".join(str(error).split()) or type(error).__name__
            else:
                self._last_at, self._error = begin, ""
            took_s = time.monotonic() - begin
            await asyncio.sleep(max(_SURVEY_PAUSE_S, took_s * _SURVEY_REST))


@command(app, "top")
async def top(
    invocation: Invocation,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="The time between two refreshes.")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="End after so many refreshes.", show_default=False)
    ] = None,
) -> None:
    """Show a cluster's bookies, their load and what is wrong, refreshed each second, until Ctrl-C.

    On a terminal it takes the whole screen, and gives it back. Elsewhere each refresh is a table, or with -o
    an object. Adds are counted at bookies, so an entry counts once for each of its copies. The survey of all
    ledgers takes its time: its age is shown, and why the last one failed.
    """
    stop = stop_event()
    async with invocation.connect() as client:
        surveyor = _Surveyor(client._context)
        surveying = asyncio.create_task(surveyor.run())
        try:
            with _shown(invocation.output) as show:
                await _refresh(client._context, surveyor, surveying, show, stop, interval, count)
        finally:
            surveying.cancel()
            await asyncio.gather(surveying, return_exceptions=True)


async def _refresh(
    context: "ClientContext",
    surveyor: _Surveyor,
    surveying: "asyncio.Task[None]",
    show: Callable[[Screen], None],
    stop: asyncio.Event,
    interval: float,
    count: int | None,
) -> None:
    before: Sample | None = None
    stopping = asyncio.create_task(stop.wait())
    shown = 0
    try:
        while count is None or shown < count:
            looking = asyncio.create_task(_look(context))
            await asyncio.wait((looking, stopping, surveying), return_when=asyncio.FIRST_COMPLETED)
            if not looking.done():
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
            if surveying.done():
                await surveying  # it ends by an error only
            if looking.cancelled():
                return
            error = ""
            try:
                now = looking.result()
            except BookKeeperError as raised:
                now = before or Sample(time.monotonic())
                error = str(raised)
            show(surveyor.screen(rows_of(before, now), error))
            before, shown = now, shown + 1
            if shown != count:
                await asyncio.wait(
                    (stopping, surveying), timeout=interval, return_when=asyncio.FIRST_COMPLETED
                )
            if stopping.done():
                return
    finally:
        stopping.cancel()


@contextmanager
def _shown(output: Output) -> Iterator[Callable[[Screen], None]]:
    """Return a function that shows a screen: over the last one on a terminal, else behind it."""
    if not (output.is_table and sys.stdout.isatty()):
        with output.stream() as put:

            def write(screen: Screen) -> None:
                if output.is_table:
                    output.document({}, text="\n".join(screen.heading()))
                    output.rows([asdict(row) for row in screen.rows], COLUMNS)
                else:
                    put(screen.document(), "")

            yield write
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda screen: live.update(screen.renderable(console.width), refresh=True)
