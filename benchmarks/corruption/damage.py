"""Damage: one file of a bookie that does not run is changed, as media, restored copies and people change it.

Owns the kinds of files and the kinds of damage. Everything is drawn from a random source that is passed in.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.corruption.states import OTHER, VICTIM, State, copy_file
from bookie_aio.storage.segment import format as form

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

PAGE = 4096
_WEIGHTS = {
    "segment, sealed": 4, "segment, active": 6, "index": 3, "checkpoint": 4, "witness": 3, "table": 3,
    "age": 2,
}  # fmt: skip


def kind_of(path: Path) -> str:
    """Return the kind of a file in a data directory; "" for a file that is not damaged."""
    name = path.name
    if name == form.COOKIE:
        return "cookie"
    if name in (form.CHECKPOINT, form.RESERVE, form.AGE):
        return name
    if name.startswith("witness"):
        return "witness"
    if form.id_of(name, form.INDEX_SUFFIX) is not None:
        return "index"
    if form.id_of(name, form.TABLE_SUFFIX) is not None:
        return "table"
    if form.id_of(name, form.SPARE_SUFFIX) is not None:
        return "spare"
    if form.id_of(name, form.SEGMENT_SUFFIX) is None:
        return ""
    if path.with_suffix(form.INDEX_SUFFIX).exists():
        return "segment, sealed"
    try:
        with path.open("rb") as file:
            file.seek(form.DATA_OFFSET)
            return "segment, active" if file.read(4) == form.GROUP_MAGIC else "segment, ready"
    except FileNotFoundError:  # the bookie runs, and has removed it
        return ""


@dataclass(frozen=True)
class Damaged:
    """One fault: which kind of file, what was done, and all files that it touched (`label_of`)."""

    file: str
    kind: str
    names: frozenset[str]
    text: str


@dataclass
class Target:
    """A file to be damaged, and where the material for it comes from."""

    path: Path
    kind: str
    others: list[Path]
    """Other files of its kind."""
    older: Sequence[State]
    """Earlier states of the same line, the newest last."""
    other_bookie: Path
    """The directory of another bookie, in the place of this one's."""
    rng: random.Random

    def used(self) -> int:
        """Return where the last byte that is not zero lies, and one more."""
        return max(1, len(self.path.read_bytes().rstrip(b"\0")))

    def somewhere(self) -> int:
        """Return an offset in the used part, near its end in a third of the cases."""
        used = self.used()
        if self.rng.random() < 0.33:
            return max(0, used - 1 - int(self.rng.random() * min(used, 3 * PAGE)))
        return int(self.rng.random() * used)


KINDS: dict[str, Callable[[Target], str | None]] = {}
"""Each changes the file, and returns what it did in a few words; None where it cannot be done."""


def _kind(function: Callable[[Target], str | None]) -> Callable[[Target], str | None]:
    KINDS[function.__name__.strip("_").replace("_", " ")] = function
    return function


def _change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@_kind
def _flip_bits(target: Target) -> str | None:
    data = target.path.read_bytes()
    if not data:
        return None
    places = [target.somewhere() for _ in range(target.rng.choice((1, 1, 3, 8)))]
    for at in places:
        if at < len(data):
            _change(target.path, at, bytes([data[at] ^ 1 << target.rng.randrange(8)]))
    return f"at {places}"


@_kind
def _zero_a_range(target: Target) -> str | None:
    at, size = target.somewhere(), target.path.stat().st_size
    if target.rng.random() < 0.6:
        at = at // PAGE * PAGE
    length = target.rng.choice((512, PAGE, PAGE, 4 * PAGE))
    _change(target.path, at, bytes(min(length, size - at)))
    return f"{length} bytes at {at}"


@_kind
def _zero_from_here_on(target: Target) -> str | None:
    at, size = target.somewhere(), target.path.stat().st_size
    if target.rng.random() < 0.5:
        at = at // PAGE * PAGE
    _change(target.path, at, bytes(size - at))
    return f"from {at}"


@_kind
def _truncate(target: Target) -> str | None:
    at = target.somewhere()
    if target.rng.random() < 0.5:
        at = at // PAGE * PAGE
    with target.path.open("r+b") as file:
        file.truncate(at)
    return f"to {at}"


@_kind
def _extend_by_zeros(target: Target) -> str | None:
    size = target.path.stat().st_size
    with target.path.open("r+b") as file:
        file.truncate(size + target.rng.choice((1, 40, PAGE, 5 * PAGE)))
    return f"behind {size}"


@_kind
def _swap_pages(target: Target) -> str | None:
    pages = (target.used() + PAGE - 1) // PAGE
    if pages < 2:
        return None
    one = target.somewhere() // PAGE
    other = target.rng.choice([page for page in range(pages) if page != one])
    data = target.path.read_bytes().ljust(pages * PAGE, b"\0")
    size = target.path.stat().st_size
    _change(target.path, one * PAGE, data[other * PAGE : (other + 1) * PAGE])
    _change(target.path, other * PAGE, data[one * PAGE : (one + 1) * PAGE])
    with target.path.open("r+b") as file:
        file.truncate(size)
    return f"{one} and {other}"


@_kind
def _duplicate_over_it(target: Target) -> str | None:
    """Put another file of its kind in its place, under its name."""
    if not target.others:
        return None
    other = target.rng.choice(target.others)
    copy_file(other, target.path)
    return f"{other.name}"


@_kind
def _of_another_bookie(target: Target) -> str | None:
    other = target.other_bookie / target.path.name
    if not other.exists() or other.read_bytes() == target.path.read_bytes():
        return None
    copy_file(other, target.path)
    return "of the same name"


@_kind
def _older_version(target: Target) -> str | None:
    """Put an earlier version of the same file back."""
    now = target.path.read_bytes()
    versions: list[Path] = []
    for state in target.older:
        older = state.path / label_of(target.path)
        if (
            older.exists()
            and (data := older.read_bytes()) != now
            and (not versions or versions[-1].read_bytes() != data)
        ):
            versions.append(older)
    if not versions:
        return None
    older = versions[-1] if target.rng.random() < 0.4 else target.rng.choice(versions)
    copy_file(older, target.path)
    return f"of {older.parent.parent.name}"


@_kind
def _misplace(target: Target) -> str | None:
    """Rename it to another number, or exchange the names of two files of its kind."""
    path, suffix = target.path, target.path.suffix
    number = form.id_of(path.name, suffix)
    if number is None:
        return None
    if target.others and target.rng.random() < 0.5:
        other = target.rng.choice(target.others)
        aside = path.with_name("aside")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)  # perhaps in the other directory
        return f"exchanged with {other.name}"
    near = number + target.rng.choice((-1, 1, 2, 5, 40))
    new = path.with_name(f"{near:0{len(path.stem)}x}{suffix}") if near > 0 else path
    if new.exists():
        return None
    path.rename(new)
    return f"to {new.name}"


@_kind
def _empty(target: Target) -> str | None:
    target.path.write_bytes(b"")
    return ""


@_kind
def _remove(target: Target) -> str | None:
    target.path.unlink()
    return ""


def label_of(path: Path) -> str:
    """Return the name of a file with that of its directory: two directories have files of one name."""
    return f"{path.parent.name}/{path.name}"


def damage(
    directories: Sequence[Path],
    state: State,
    older: Sequence[State],
    rng: random.Random,
    *,
    active_only: bool = False,
) -> Damaged | None:
    """Damage one file of a bookie that was copied from `state`; None where the draw cannot be done.

    Args:
        directories: the bookie's data directories.
        state: the state that they were copied from.
        older: earlier states, from which older versions of files are taken.
        rng: draws everything.
        active_only: damage the segment that is being written, and no other file.
    """
    by_kind: dict[str, list[Path]] = {}
    for path in sorted(path for directory in directories for path in directory.iterdir()):
        if kind := kind_of(path):
            by_kind.setdefault(kind, []).append(path)
    kinds = [kind for kind in by_kind for _ in range(_WEIGHTS.get(kind, 1))]
    kind = "segment, active" if active_only else rng.choice(kinds)
    if kind not in by_kind:
        return None
    path = max(by_kind[kind], key=lambda one: one.name) if active_only else rng.choice(by_kind[kind])
    what = rng.choice(sorted(KINDS))
    before = _seen(directories)
    others = [other for other in by_kind[kind] if other != path]
    other_bookie = state.path / path.parent.name.replace(VICTIM, OTHER)
    text = KINDS[what](Target(path, kind, others, older, other_bookie, rng))
    if text is None:
        return None
    after = _seen(directories)
    touched = {name for name in before | after if before.get(name) != after.get(name)}
    if not touched:
        return None
    return Damaged(kind, what, frozenset(touched), f"{label_of(path)}: {what} {text}".strip())


def restore(directories: Sequence[Path], older: State, rng: random.Random) -> Damaged | None:
    """Put several files of an earlier state back, as a restore that does not get to its end leaves them.

    Files that the earlier state has not are removed, or left. None where nothing changes.
    """
    share = rng.choice((0.2, 0.5, 0.8, 0.95, 1.0))
    removes = rng.random() < 0.5
    before = _seen(directories)
    spared = rng.choice(("", "cookie", "age", "age", "witness", "checkpoint", "index", "segment, active"))
    for directory in directories:
        source = older.path / directory.name
        paths = (*directory.iterdir(), *source.iterdir())
        for name in sorted({path.name for path in paths if kind_of(path)}):
            if rng.random() >= share or (spared and spared == kind_of(directory / name)):
                continue
            if (source / name).exists():
                copy_file(source / name, directory / name)
            elif removes:
                (directory / name).unlink()
    after = _seen(directories)
    touched = frozenset(name for name in before | after if before.get(name) != after.get(name))
    if not touched:
        return None
    text = f"{share:.0%} of {older.path.name}{', with removals' if removes else ''}; spared: {spared or '-'}"
    return Damaged("several", "restore in part", touched, text)


def _seen(directories: Sequence[Path]) -> dict[str, bytes]:
    seen = {}
    for path in (path for directory in directories for path in directory.iterdir()):
        with suppress(FileNotFoundError):  # the bookie may run, and remove files
            if path.is_file():
                seen[label_of(path)] = path.read_bytes()
    return seen


def remove(directory: Path) -> None:
    """Remove a directory that is not needed any more."""
    shutil.rmtree(directory, ignore_errors=True)
