"""The text forms of ledgers, of logs, and of a whole cluster's state. Pure."""

import base64
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from client_aio.admin.repair import RepairedFragment, RepairReport
from client_aio.admin.replicas import Replica
from client_aio.autorecovery.drain import DrainPlan, DrainProgress
from client_aio.autorecovery.survey import AutoRecoveryState, ClusterSurvey
from client_aio.autorecovery.verification import Totals, VerifiedLedger
from client_aio.core.audit import Ties
from client_aio.core.repair_plan import EntryRun
from client_aio.log.gaps import LogGap
from client_aio.log.takeover import LogMetadata
from metadata.access.repair_tasks import COPIES_MAX
from metadata.errors import InvalidArgumentError
from metadata.model.given_up import GivenUp
from metadata.model.ledger import LedgerMetadata
from metadata.model.log import LogRow
from metadata.text import escape

if TYPE_CHECKING:
    from bookie_aio.storage.inspection import Inspection  # a bookie's storage, which few commands need

_BAR_WIDTH = 32
_FAILED_SHOWN = 50


def custom_of(pairs: Sequence[str] | None) -> dict[str, bytes]:
    """Parse `KEY=VALUE` options; raises InvalidArgumentError."""
    custom = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidArgumentError(f"--custom {pair!r} is not KEY=VALUE")
        custom[key] = os.fsencode(value)  # the bytes of the command line, whatever they are
    return custom


def text_of(data: bytes) -> dict[str, str]:
    """Return bytes as `text` where they are UTF-8, otherwise as `base64`."""
    try:
        return {"text": bytes(data).decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def ledger_row(metadata: LedgerMetadata) -> dict[str, Any]:
    """Return the row of `ledger list`."""
    return {
        "ledger_id": metadata.ledger_id,
        "state": metadata.state.value,
        "quorums": f"E={metadata.ensemble_size} Qw={metadata.write_quorum} Qa={metadata.ack_quorum}",
        "ensemble_size": metadata.ensemble_size,
        "write_quorum": metadata.write_quorum,
        "ack_quorum": metadata.ack_quorum,
        "fragments": len(metadata.rows),
        "last_entry": metadata.last_entry,
        "length": metadata.length,
        "created": datetime.fromtimestamp(metadata.created_ms / 1000, UTC).isoformat(timespec="seconds"),
        "name": metadata.unbounded.name if metadata.unbounded is not None else None,
    }


def draw_ledger(metadata: LedgerMetadata) -> str:
    """Draw the ledger: its state, and for each fragment its entries, its share of them and its bookies.

        ledger 7  CLOSED  E=3 Qw=3 Qa=2  crc32c
        entries 0–412,000, 30,000,000 bytes

        fragment  entries             bookies
               0  0–137,332           b1  b2  b3   ███████████
               1  137,333–412,000     b1  b4  b3              █████████████████████
                                          ^^

    A bookie that was not in the fragment before is underlined. A ledger that is not CLOSED is drawn without
    an end.
    """
    quorums = f"E={metadata.ensemble_size} Qw={metadata.write_quorum} Qa={metadata.ack_quorum}"
    lines = [f"ledger {metadata.ledger_id}  {metadata.state.value}  {quorums}  {metadata.digest}"]
    if metadata.unbounded is not None:
        lines.append(f"unbounded  {metadata.unbounded.name}  term {metadata.term}".replace("    ", "  "))
    if metadata.last_entry is None:
        lines.append(f"entries {metadata.first_entry:,}–…")
    elif metadata.last_entry < metadata.first_entry:
        lines.append(entries_text(metadata.first_entry, metadata.last_entry))
    else:
        span = entries_text(metadata.first_entry, metadata.last_entry)
        lines.append(f"{span}, {metadata.length or 0:,} bytes")
    if metadata.below_write_quorum_from is not None:
        lines.append(
            f"closed at the ack quorum: entries from {metadata.below_write_quorum_from:,} on may have fewer "
            f"than {metadata.write_quorum} copies"
        )
    if metadata.custom:
        lines += [f"custom {escape(key)} = {value!r}" for key, value in metadata.custom.items()]
    return "\n".join([*lines, "", *_draw_fragments(metadata)])


def draw_replicas(replicas: Sequence[Replica]) -> str:
    """Say of each bookie of each fragment whether it holds what it owes.

    fragment  from entry  bookie  holds
           0           0  b1      all 137,333 entries
    """
    numbers = {
        first: number for number, first in enumerate(dict.fromkeys(one.first_entry for one in replicas))
    }
    width = max([len("bookie"), *(len(replica.bookie_id) for replica in replicas)])
    lines = [f"fragment  from entry  {'bookie':<{width}}  holds"]
    for replica in replicas:
        first = replica.first_entry
        lines.append(f"{numbers[first]:>8}  {first:>10,}  {replica.bookie_id:<{width}}  {_state_of(replica)}")
    return "\n".join(lines)


def _state_of(replica: Replica) -> str:
    if replica.error:
        return f"not known: {escape(replica.error)}"
    lost = "; it lost data of this ledger" if replica.is_damaged else ""
    if replica.entries_owed is None or replica.entries_missing is None:
        return f"what it has acknowledged so far{lost}"
    if replica.entries_missing == 0:
        return f"all {replica.entries_owed:,} entries{lost}"
    return f"{replica.entries_missing:,} of {replica.entries_owed:,} entries are missing{lost}"


def text_of_repair(report: RepairReport, *, is_unbounded: bool = False) -> str:
    """Return the report of a repair, a line for each fragment; each line names the ledger."""
    lines = ["recovered, and closed"] if report.was_recovered else []
    for fragment in report.fragments:
        how = (
            f"{report.replaced} repaired in its place"
            if fragment.replacement == report.replaced
            else f"{report.replaced} replaced by {fragment.replacement}"
        )
        lines.append(
            f"{entries_text(fragment.first_entry, fragment.last_entry)}: {how}, "
            f"{fragment.entries_copied:,} entries ({fragment.bytes_copied:,} bytes) copied"
        )
        if fragment.lost:
            lines.append(_text_of_lost(fragment))
    if report.is_mark_lifted:
        lines.append(f"{report.replaced} has all that it owes again: its mark of lost data was lifted")
    elif report.mark_left:
        lines.append(f"{report.replaced} keeps its mark of lost data: {escape(report.mark_left)}")
    if report.is_last_fragment_left:
        way_out = (
            "`bookie-aio ledger takeover` begins another one"
            if is_unbounded
            else "--recover-after closes the ledger"
        )
        lines.append(
            f"not closed, and {report.replaced} is still in its last fragment: its writer replaces it "
            f"when it fails, or {way_out}"
        )
    if not lines:
        lines = [f"{report.replaced} is in no fragment"]
    return "\n".join(f"ledger {report.ledger_id}: {line}" for line in lines)


def _text_of_lost(fragment: RepairedFragment) -> str:
    count = sum(run.entries for run in fragment.lost)
    text = f"{count:,} entries can be had from no bookie: {_text_of_runs(fragment.lost)}"
    if fragment.unanswered:
        text += (
            f"; {', '.join(fragment.unanswered)} did not answer: when they do, run `bookie-aio ledger repair "
            f"--replace {fragment.replacement} --with {fragment.replacement}`"
        )
    return text


_RUNS_SHOWN = 5


def verification_text(bad: Sequence[VerifiedLedger], totals: Totals) -> str:
    """Return the text of `ledger verify`: the ledgers of which copies are bad, and the sums.

    ledger 7: degraded, 2 of 3 copies of some entries are good
      b3, entries 0–999: 12 of 1,000 missing, 1 damaged (17, 40–51)
    """
    lines = []
    for ledger in bad:
        if ledger.error:
            lines.append(f"ledger {ledger.ledger_id}: {ledger.condition.label}, {escape(ledger.error)}")
            continue
        lines.append(
            f"ledger {ledger.ledger_id}: {ledger.condition.label}, {ledger.good_copies} of "
            f"{ledger.write_quorum} copies of some entries are good"
        )
        for one in ledger.bad:
            where = f"  {one.bookie_id}, {entries_text(one.first_entry, one.last_entry)}:"
            if one.error:
                lines.append(f"{where} {one.owed - one.intact:,} were not read: {escape(one.error)}")
                continue
            damaged = f", {one.damaged:,} damaged" if one.damaged else ""
            lines.append(
                f"{where} {one.missing:,} of {one.owed:,} missing{damaged} ({_text_of_runs(one.bad.runs())})"
            )
    counts = ", ".join(f"{count:,} {label}" for label, count in totals.by_condition.items())
    lines.append(f"{totals.condition.label}: {totals.ledgers:,} ledgers" + (f" ({counts})" if bad else ""))
    lines.append(
        f"  copies of entries: {totals.intact:,} intact, {totals.missing:,} missing or not read, "
        f"{totals.damaged:,} damaged"
    )
    if totals.ends_left_out:
        lines.append(f"  the last fragment of {totals.ends_left_out:,} ledgers that are not closed: not read")
    if totals.codes_unchecked:
        lines.append(
            f"  {totals.codes_unchecked:,} ledgers have a password that was not given: only checksums checked"
        )
    return "\n".join(lines)


def _text_of_runs(runs: Sequence[EntryRun]) -> str:
    shown = [
        f"{run.first:,}"
        if run.first == run.last
        else f"{run.first:,}–{run.last:,}" + (f" (each {run.step}th)" if run.step > 1 else "")
        for run in runs[:_RUNS_SHOWN]
    ]
    if len(runs) > _RUNS_SHOWN:
        shown.append(f"{len(runs) - _RUNS_SHOWN:,} runs more")
    return ", ".join(shown)


def _draw_fragments(metadata: LedgerMetadata) -> list[str]:
    spans = []
    for index, fragment in enumerate(metadata.fragments):
        following = metadata.fragments[index + 1 :]
        end = following[0].first_entry - 1 if following else metadata.last_entry
        spans.append((fragment.first_entry, end))
    ranges = [_range(first, end) for first, end in spans]
    range_width = max(len("entries"), *map(len, ranges))
    widths = [
        max(len(fragment.bookies[place]) for fragment in metadata.fragments)
        for place in range(metadata.ensemble_size)
    ]
    lines = [f"fragment  {'entries':<{range_width}}  bookies"]
    before = len(metadata.rows) - len(metadata.fragments)
    if before:
        lines.append(f"{before:,} fragments before these are in pages")
    previous: tuple[str, ...] | None = None
    for index, fragment in enumerate(metadata.fragments):
        names = "  ".join(f"{name:<{width}}" for name, width in zip(fragment.bookies, widths, strict=True))
        bar = _bar(*spans[index], metadata.last_entry)
        lines.append(f"{before + index:>8}  {ranges[index]:<{range_width}}  {names}  {bar}".rstrip())
        if previous is not None and previous != fragment.bookies:
            marks = "  ".join(
                f"{'^' * len(name) if name != old else '':<{width}}"
                for name, old, width in zip(fragment.bookies, previous, widths, strict=True)
            )
            lines.append(f"{'':>8}  {'':<{range_width}}  {marks}".rstrip())
        previous = fragment.bookies
    return lines


def given_up_text(lost: GivenUp, last_entry: int) -> str:
    """Return the text of what was given up when a ledger was closed behind an entry."""
    parts = [f"what {', '.join(lost.bookies)} may hold behind entry {last_entry:,}"] if lost.bookies else []
    if lost.lac > last_entry:
        parts.append(f"entries {_range(last_entry + 1, lost.lac)}, which were acknowledged")
    if lost.missing:
        parts.append(f"{lost.missing:,} entries before the end")
    return ", ".join(parts) or f"entries behind {last_entry:,} that may have been acknowledged"


def entries_text(first: int, last: int) -> str:
    """Return the text of a run of entries, which may be empty."""
    return f"entries {_range(first, last)}" if last >= first else "no entries"


def _range(first: int, last: int | None) -> str:
    if last is None:
        return f"{first:,}–…"
    return f"{first:,}–{last:,}" if last >= first else "none"


def _bar(first: int, last: int | None, ledger_last: int | None) -> str:
    """Return the bar of the fragment's place in the ledger; empty while the ledger has no end."""
    if last is None or not ledger_last or last < first:
        return ""
    total = ledger_last + 1
    start = first * _BAR_WIDTH // total
    end = max(start + 1, (last + 1) * _BAR_WIDTH // total)
    return " " * start + "█" * (end - start)


def log_row(name: str, metadata: LogMetadata) -> dict[str, Any]:
    """Return the row of `log list`."""
    return {
        "log": name,
        "ledgers": len(metadata.rows),
        "begins_at": str(metadata.begins_at),
        "last_ledger": metadata.rows[-1].id if metadata.rows else None,
        "created": _time(metadata.created_ms),
    }


def link_of(row: LogRow, ledger: LedgerMetadata | None) -> dict[str, Any]:
    """Return the row of `log show` for one ledger; `ledger` is None where it does not exist."""
    return {
        "id": row.id,
        "ledger_id": row.ledger_id,
        "state": "GONE" if ledger is None else ledger.state.value,
        "entries": None if ledger is None or ledger.last_entry is None else ledger.last_entry + 1,
        "bytes": None if ledger is None else ledger.length,
        "ensembles": [] if ledger is None else [list(fragment.bookies) for fragment in ledger.fragments],
        "listed": _time(row.created_ms),
    }


def gap_row(gap: LogGap) -> dict[str, Any]:
    """Return the row of a gap in a log."""
    last = None if gap.last is None else str(gap.last)
    return {"first": str(gap.first), "last": last, "reason": str(gap.error)}


def draw_log(metadata: LogMetadata, links: Sequence[dict[str, Any]]) -> str:
    """Draw the chain, a line for each ledger, oldest first.

        log orders  3 ledgers, begins at 7:0
        custom app = b'demo'

             id  state   entries      bytes  ensembles           listed
        ┬     7  CLOSED    1,000  1,000,000  b1 b2 b3 → b1 b4 b3  2026-01-01T00:00:00+00:00
        ├     8  CLOSED    1,000  1,000,000  b1 b2 b3            …
        └     9  OPEN          …          …  b2 b3 b4            …

    A ledger that was added under another id than its own is written `id=ledger`. Where only the last links
    are given, the omitted ones are counted.
    """
    count = len(metadata.rows)
    lines = [
        f"log {metadata.name}  {count:,} {'ledger' if count == 1 else 'ledgers'}, "
        f"begins at {metadata.begins_at}"
    ]
    lines += [f"custom {escape(key)} = {value!r}" for key, value in metadata.custom.items()]
    lines += [f"query {escape(query)}: batch {batch}" for query, batch in metadata.transactions.items()]
    if not links:
        return "\n".join(lines)
    cells: list[tuple[str, ...]] = [("", "id", "state", "entries", "bytes", "ensembles", "listed")]
    left_out = count - len(links)
    for index, link in enumerate(links):
        is_first, is_last = index == 0 and not left_out, index == len(links) - 1
        mark = "─" if is_first and is_last else "┬" if is_first else "└" if is_last else "├"
        cells.append((mark, *_cells_of(link)))
    widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
    lines.append("")
    for index, row in enumerate(cells):
        if index == 1 and left_out:
            lines.append(f"┬  … {left_out:,} more, --ledgers shows them")
        mark, name, state, entries, size, ensembles, listed = (
            f"{cell:>{width}}" if place in (1, 3, 4) else f"{cell:<{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((mark, name, state, entries, size, ensembles, listed)).rstrip())
    return "\n".join(lines)


def _cells_of(link: dict[str, Any]) -> tuple[str, ...]:
    name = str(link["id"]) if link["id"] == link["ledger_id"] else f"{link['id']}={link['ledger_id']}"
    return (
        name,
        link["state"],
        "…" if link["entries"] is None else f"{link['entries']:,}",
        "…" if link["bytes"] is None else f"{link['bytes']:,}",
        " → ".join(" ".join(bookies) for bookies in link["ensembles"]),
        link["listed"],
    )


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")


def survey_text(found: ClusterSurvey) -> str:
    """Return the text of `cluster status`."""
    lines = [found.condition.label]
    lines += [f"  {escape(problem.text)}" for problem in found.problems]
    lines.append("")
    for one in found.bookies:
        facts = [f"{one.ledgers:,} ledgers"]
        if one.order is not None:
            facts.insert(0, f"ordered to be {one.order}")
        if one.disk_free_bytes is not None and one.disk_bytes is not None:
            facts.append(f"{one.disk_free_bytes / 2**30:,.1f} of {one.disk_bytes / 2**30:,.1f} GiB free")
        if one.segment_bytes is not None:
            facts.append(f"{one.segment_bytes / 2**30:,.1f} GiB of ledgers")
        if one.is_tight:
            facts.append("disks nearly full")
        if one.ledgers_damaged:
            facts.append(f"data lost of {one.ledgers_damaged:,} ledgers")
        if one.gone_s is not None:
            facts.append(f"gone for {one.gone_s:,.0f} s at least")
        if one.rack:
            facts.append(f"rack {escape(one.rack)}")
        if one.weight is not None:
            facts.append(f"weight {one.weight:g}")
        if one.version is not None:
            facts.append(f"version {escape(one.version)}")
        lines.append(f"bookie {one.bookie_id}: {one.state}, {', '.join(facts)}")
    states = ", ".join(f"{count:,} {state}" for state, count in found.ledgers.items())
    lines.append(f"ledgers: {states or 'none'}")
    if found.given_up:
        lines.append(f"closed with a loss that was accepted: {found.given_up:,} ledgers")
    return "\n".join([*lines, recovery_text(found.auto_recovery)])


def recovery_text(state: AutoRecoveryState) -> str:
    """Return the text of `autorecovery status`."""
    estimate = "" if not state.estimate_s else f", about {state.estimate_s:,.0f} s of work"
    waiting = f" and {state.record.waiting:,} behind them" if state.record.waiting else ""
    lines = [
        f"auto recovery: {'paused, ' if state.is_paused else ''}auditor {escape(state.auditor or 'none')}, "
        f"{sum(not one.is_by_hand for one in state.workers)} workers, "
        f"{len(state.refs):,} tasks{waiting}{estimate}"
    ]
    for copies, count in state.by_copies.items():
        what = f"with {copies} good copies of some entries"
        lines.append(f"  {count:,} ledgers {'to spread over racks' if copies == COPIES_MAX else what}")
    if aside := sum(state.record.aside.values()):
        lines.append(f"  {aside:,} of those behind them failed before, and take turns")
    failed = [one for one in state.tasks if one[1].attempts]
    for ref, task in failed[:_FAILED_SHOWN]:
        why = "; ".join(", ".join([reason, *names]) for reason, names in task.reasons.items())
        lines.append(f"  ledger {ref.ledger_id} ({why}), {task.attempts} attempts: {escape(task.error)}")
    if len(failed) > _FAILED_SHOWN:
        lines.append(f"  {len(failed) - _FAILED_SHOWN:,} ledgers more that failed: -o json has all of them")
    lines += [
        f"  {escape(worker.name)} repairs ledger {worker.ledger_id}"
        if worker.ledger_id is not None
        else f"  {escape(worker.name)}: `cluster repair` has repaired {worker.repaired:,} ledgers"
        for worker in state.workers
        if worker.ledger_id is not None or worker.is_by_hand
    ]
    return "\n".join(lines)


def document_of_plan(plan: DrainPlan) -> dict[str, Any]:
    """Return what `bookie decommission --dry-run -o json` prints."""
    return {
        "bookie_id": plan.bookie_id,
        "successor": plan.successor or None,
        "running": plan.is_running,
        "ledgers": len(plan.ties),
        "to_copy": plan.count(Ties.COPIES),
        "open": plan.count(Ties.WRITER),
        "in_recovery": plan.count(Ties.RECOVERY),
        "with_entries_found_nowhere": plan.count(Ties.ABSENT),
        "stuck": plan.stuck,
        "least_bytes": plan.least_bytes,
        "free_bytes": plan.free_bytes,
        "has_room": plan.has_room,
    }


def text_of_plan(plan: DrainPlan) -> str:
    """Return the text of `bookie decommission --dry-run`."""
    state = "runs" if plan.is_running else "is down"
    lines = [
        f"bookie {plan.bookie_id} {state}, and {len(plan.ties):,} ledgers name it: "
        f"{plan.count(Ties.COPIES):,} to copy, {plan.count(Ties.WRITER):,} open, "
        f"{plan.count(Ties.RECOVERY):,} in recovery"
    ]
    if plan.count(Ties.ABSENT):
        lines.append(f"{plan.count(Ties.ABSENT):,} have entries that only it may hold: repair them first")
    least, free = plan.least_bytes / 2**30, plan.free_bytes / 2**30
    lines.append(f"others have to take {least:,.1f} GiB at least, and have {free:,.1f} GiB free")
    if plan.stuck:
        named = ", ".join(map(str, plan.stuck[:20])) + (", …" if len(plan.stuck) > 20 else "")
        lines.append(f"{len(plan.stuck):,} have no other bookie to move to: {named}. Start another bookie")
    elif not plan.has_room:
        lines.append("they have too little room. Start another bookie")
    else:
        lines.append("nothing stands against it" if not plan.count(Ties.ABSENT) else "")
    return "\n".join(line for line in lines if line)


def progress_of_drain(now: DrainProgress) -> str:
    """Return the figures beside the bar of `bookie decommission`."""
    if now.is_paused:
        return f"{now.ledgers_left:,} ledgers left; auto recovery is paused"
    if now.is_behind:
        return f"{now.ledgers_left:,} ledgers left; workers repair other ledgers first"
    estimate = "" if now.estimate_s is None else f", about {now.estimate_s:,.0f} s"
    waiting = f", {now.writers_left:,} open" if now.writers_left else ""
    return f"{now.ledgers_left:,} ledgers left{waiting}{estimate}"


def cluster_repair_text(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return the text of `cluster repair`: a line for each ledger, and the sums.

    ledger 7, 1 good copies: b3 replaced: repaired
    """
    lines = []
    for row in rows:
        ways = [f"{name} replaced" for name in row["replaced"]]
        ways += [f"{name} in its place" for name in row["in_place"]]
        line = f"ledger {row['ledger_id']}, {row['good_copies']} good copies: {', '.join(ways)}"
        if "is_done" in row:
            line += ": repaired" if row["is_done"] else f": not repaired: {escape(row['error'])}"
        lines.append(line)
    if summary["dry_run"]:
        lines.append(f"{summary['ledgers_lacking']:,} ledgers would be repaired, nothing was changed")
    else:
        lines.append(
            f"{summary['repaired']:,} ledgers repaired, {summary['failed']:,} not; "
            f"{summary['bytes_read']:,} bytes read"
        )
    if summary["lost"]:
        lines.append(f"lost bookies: {', '.join(summary['lost'])}")
    for name, count in summary["unknown"].items():
        lines.append(f"bookie {name} does not answer: {count:,} ledgers may lack copies there")
    if summary["left_to_writers"]:
        lines.append(
            f"{summary['left_to_writers']:,} ledgers that are not closed name a bookie that is down in their "
            "last fragment: their writers replace it, or `ledger recover` closes them"
        )
    if summary["unreadable"]:
        lines.append(f"the metadata of {summary['unreadable']:,} ledgers do not parse")
    return "\n".join(lines)


def inspection_text(found: "Inspection", age: Mapping[str, Any] | None) -> str:
    """Return the text of `bookie inspect`: the bookie, its segments, its ledgers, and the damage."""
    cookie = found.cookie
    lines = [
        f"bookie {cookie.bookie_id} of cluster {cookie.instance_id}, incarnation {cookie.incarnation}",
        f"directories: {', '.join(map(escape, found.directories))}",
    ]
    if age is None:
        lines.append("age: none that could be read")
    else:
        doubt = f", in doubt below ledger {age['in_doubt_below']:,}" if age["doubt"] else ""
        lines.append(f"age {age['number']:,}, knows of ledger ids below {age['ids_known']:,}{doubt}")
    live = sum(one.live_bytes for one in found.segments)
    dead = sum(one.dead_bytes for one in found.segments)
    lines.append(
        f"checkpoint {found.checkpoint}, {len(found.segments):,} segments, {live:,} bytes live and {dead:,} "
        f"dead, {found.spare_files:,} spare files, {found.reserve_bytes:,} bytes in reserve"
    )
    for segment in found.segments:
        state = "sealed" if segment.is_sealed else "not sealed"
        lines.append(
            f"  segment {segment.segment_id:016x}: {state}, {segment.used_bytes:,} of {segment.file_bytes:,} "
            f"bytes used, {segment.live_bytes:,} live, {segment.groups:,} groups, {segment.ledgers:,} ledgers"
        )
    if found.tail_records:
        lines.append(
            f"  the last group, of {found.tail_records:,} records, is written again at the next start"
        )
    for ledger in found.ledgers:
        facts = [f"{ledger.entries:,} entries", f"{ledger.bytes:,} bytes"]
        facts += [f"the last is {ledger.last_entry:,}"] if ledger.last_entry >= 0 else []
        facts += [f"fenced with term {ledger.term:,}"] if ledger.term else []
        facts += [f"trimmed below {ledger.first_kept:,}"] if ledger.first_kept else []
        facts += ["marked: data of it was lost"] if ledger.is_marked else []
        lines.append(f"ledger {ledger.ledger_id}: {', '.join(facts)}")
    deleted = sum(last + 1 - first for first, last in found.deleted_ranges)
    lines.append(f"deleted ids: {deleted:,} in {len(found.deleted_ranges):,} ranges")
    if found.marks_of_all.get("all_damaged"):
        upto = found.marks_of_all["all_damaged_up_to"]
        lines.append(f"marked: data was lost of any ledger{'' if upto is None else f' up to {upto}'}")
    for one in found.damage:
        parts = [] if one.segment_id is None else [f"segment {one.segment_id:016x}"]
        parts += [] if one.offset is None else [f"byte {one.offset:,}"]
        parts += [] if one.ledger_id is None else [f"ledger {one.ledger_id}"]
        if one.first_entry is not None and one.last_entry is not None:
            parts.append(entries_text(one.first_entry, one.last_entry))
        where = f"{', '.join(parts)}: " if parts else ""
        note = "" if one.counts else " (nothing is lost by it)"
        lines.append(f"damage: {where}{escape(one.text)}{note}")
    if not found.damage:
        lines.append("no damage found")
    return "\n".join(lines)
