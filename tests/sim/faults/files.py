"""Faults of whole files: restored copies, and mistakes of operators in the directories of a bookie.

Owns the kinds that set one file back to an earlier version, cut, empty, remove, zero, exchange or rename it.
Owns the kinds that set all directories back, or start a second bookie on a copy of them. All of them strike
the one bookie whose medium may lie. Each kills it first.

The limits of such faults follow from what the files say of one another (docs/STORAGE.md):

- Any file may be missing, short, or of another number or version: another file names it.
- After a kill the witness names every acknowledged group. So bytes anywhere may be zeros or other pages, and
  the segment that is being written may be set back.
- After a power cut it may not name the last groups. So what follows from the last group on is left alone, and
  the segment that is being written is not set back: a crash leaves the like.
- Of two faults that strike at a time, the second does not set the witness back where the first took the last
  group. Both would make a copy of the last two seconds, which nothing needs to tell from the directory.
- A directory is set back to a moment before the bookie's last start. So the store knows of a start that the
  directory does not.

A bookie one of whose cookies is gone, cut, or another one's does not serve (WhoLostItsCookieDoesNotServe).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.core.identity import AgeFile
from bookie_aio.storage.segment import format as form
from tests.sim.cluster.hardware import PAGE, Directory, Hardware, Inode, apply
from tests.sim.faults.kinds import kind

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from tests.sim.plan import Fault
    from tests.sim.simulation import Simulation

_BACK_AFTER_S = 0.1
_COPY_ALONE_S = 4.0
"""Longer than the session of the bookie that was killed, which holds its registration."""
_SUFFIXES = (form.SEGMENT_SUFFIX, form.INDEX_SUFFIX, form.TABLE_SUFFIX, form.SPARE_SUFFIX)
_NAMES = (form.CHECKPOINT, "witness", form.AGE, form.COOKIE, form.RESERVE)
Place = tuple[str, str]
"""A directory, and a name in it."""


def kind_of(name: str) -> str:
    """Return what kind of file a name stands for; "" for one that is left alone."""
    for suffix in _SUFFIXES:
        if form.id_of(name, suffix) is not None:
            return suffix
    return name if name in _NAMES else ""


class Files:
    """The files of one bookie that does not run."""

    def __init__(self, disk: Hardware, rng: random.Random, *, is_exact: bool) -> None:
        """`is_exact`: the bookie was killed just now, and the system has kept every write."""
        self.disk = disk
        self.rng = rng
        self.is_exact = is_exact
        for directory in disk.directories.values():
            # The system writes the names of a dead process sooner or later.
            directory.end_sync(len(directory.changes), has_failed=False)

    def names(self) -> list[Place]:
        """Return all files that may be damaged, in a fixed order."""
        return [
            (path, name)
            for path, directory in sorted(self.disk.directories.items())
            for name in sorted(directory.entries)
            if kind_of(name)
        ]

    def draw(self, allows: Callable[[Place], bool] = lambda place: True) -> Place | None:
        """Draw a file: first its kind, so that a few files of a kind are met as often as many."""
        places = [place for place in self.names() if allows(place)]
        kinds = sorted({kind_of(name) for _, name in places})
        if not kinds:
            return None
        wanted = self.rng.choice(kinds)
        of_kind = [place for place in places if kind_of(place[1]) == wanted]
        newest = [place for place in of_kind if self.is_written_to(place)]
        return self.rng.choice(newest if newest and self.rng.random() < 0.5 else of_kind)

    def inode(self, place: Place) -> Inode:
        """Return the file at a place."""
        return self.disk.directories[place[0]].entries[place[1]]

    def is_written_to(self, place: Place) -> bool:
        """Return whether a file has the last group of the journal."""
        return self.disk.last_group is not None and self.inode(place) is self.disk.last_group[0]

    @property
    def has_last_group(self) -> bool:
        """Return whether there are bytes where the last group of the journal was written."""
        if self.disk.last_group is None:
            return True
        inode, start, end = self.disk.last_group
        return any(inode.data[start:end])

    def put(self, place: Place, content: bytes) -> None:
        """Give a file other bytes, which are durable."""
        put(self.inode(place), content)

    def name(self, place: Place, inode: Inode | None) -> None:
        """Give a name to a file, or take it away, durably."""
        directory = self.disk.directories[place[0]]
        for entries in (directory.entries, directory.durable):
            apply(entries, ((place[1], inode),))

    def pages(self, place: Place) -> list[int]:
        """Return the pages of a file that were written. After a power cut: below the last group."""
        inode = self.inode(place)
        size = len(inode.data)
        if self.is_written_to(place) and not self.is_exact:
            assert self.disk.last_group is not None
            size = min(size, self.disk.last_group[1])
        first = 1 if place[1].endswith(form.SEGMENT_SUFFIX) else 0
        return [page for page in sorted(inode.written) if page >= first and (page + 1) * PAGE <= size]


def put(inode: Inode, content: bytes) -> None:
    """Give a file other bytes, which are durable."""
    inode.data, inode.durable = bytearray(content), bytearray(content)
    inode.dirty.clear()
    inode.size_is_dirty = False
    pages = range((len(content) + PAGE - 1) // PAGE)
    inode.written = {page: None for page in pages if content[page * PAGE : (page + 1) * PAGE].strip(b"\0")}


def _strike(simulation: Simulation, fault: Fault, change: Callable[[Files], str]) -> bool:
    """Kill the bookie, change its files, and have it started. Return False if nothing was changed."""
    name = simulation.dishonest
    if name not in simulation.served or name in simulation.wiped:
        return False
    has_power = fault.other != "power"
    was_up = simulation.stop_bookie(name, has_power=has_power, back_after=_BACK_AFTER_S)
    files = Files(simulation.disks[name], simulation.fault_rng, is_exact=has_power and was_up)
    cookies = simulation.lost_cookies or _cookies(files.disk)
    text = change(files)
    # A second fault may mend the first: the cookie of one directory is copied over that of another.
    simulation.lost_cookies = cookies if _cookies(files.disk) != cookies else []
    if text:
        simulation.history.note("fault", fault.kind, name, text)
        simulation.damaged_files.append(text)
    return bool(text) and was_up


def _cookies(disk: Hardware) -> list[bytes]:
    return [
        bytes(inode.data)
        for _, directory in sorted(disk.directories.items())
        if (inode := directory.entries.get(form.COOKIE)) is not None
    ]


# --- one file --------------------------------------------------------------------------------------


@kind
def file_set_back(simulation: Simulation, fault: Fault) -> None:
    """A file is copied, and put back over its newer version after `lasts`."""
    disk = simulation.disks[simulation.dishonest]
    copies = {
        (path, name): bytes(inode.data)
        for path, directory in sorted(disk.directories.items())
        for name, inode in sorted(directory.entries.items())
        if kind_of(name)
    }

    def change(files: Files) -> str:
        def differs(place: Place) -> bool:
            if place not in copies or copies[place] == files.inode(place).data:
                return False
            if kind_of(place[1]) == "witness" and not files.has_last_group:
                return False  # an earlier fault took the group: both are a copy of the last two seconds
            return files.is_exact or not files.is_written_to(place)

        place = files.draw(differs)
        if place is None:
            return ""
        files.put(place, copies[place])
        return f"{place[1]} is as it was at {fault.at:.3f} s"

    simulation.after(fault.lasts, _later, simulation, fault, partial(_strike, change=change))


def _reached(disk: Hardware) -> tuple[int, int]:
    """Return the segment that was written to last, and where its groups end."""
    if disk.last_group is None:
        return 0, 0
    inode, _, end = disk.last_group
    ids = [
        number
        for directory in disk.directories.values()
        for name, entry in directory.entries.items()
        if entry is inode and (number := form.id_of(name, form.SEGMENT_SUFFIX)) is not None
    ]
    return max(ids, default=0), end


def _ages(image: Image) -> list[AgeFile]:
    """Return the age files of all directories."""
    found = [AgeFile.parse(files[form.AGE]) for files in image.values() if form.AGE in files]
    return [file for file in found if file is not None]


@kind
def files_set_back(simulation: Simulation, fault: Fault) -> None:
    """Many files, perhaps all, are put back as they were `lasts` before, by a restore that was cut short.

    Files that came since are removed, or stay. The age files say that more was durable since the copy. They
    are put back as well only if the age was raised since. Or they are gone: a restore has left them out. If
    nothing tells of a segment that is put back, the files are as they were in the last two seconds: all stay.
    """
    disk, rng = simulation.disks[simulation.dishonest], simulation.fault_rng
    image, reached = image_of(disk), _reached(disk)
    age = max((max(file.number, file.intended) for file in _ages(image)), default=0)

    def change(files: Files) -> str:
        present = image_of(files.disk)
        ages = _ages(present)
        claimed = max(((file.durable[1], file.durable[3]) for file in ages), default=(0, 0))
        if not files.is_exact or claimed <= reached:
            return ""
        share, removes = rng.choice((0.3, 0.7, 0.9, 1.0)), rng.random() < 0.5
        is_raised = any(file.number > age for file in ages)
        spares_age = not is_raised or rng.random() < 0.7
        loses_age = rng.random() < 0.2
        chosen: dict[Place, bytes | None] = {}
        for path in sorted(present):
            for name in sorted({*present[path], *image.get(path, {})}):
                if (name == form.AGE and spares_age) or name == form.COOKIE or rng.random() >= share:
                    continue
                older = image.get(path, {}).get(name)
                if older != present[path].get(name) and (older is not None or (removes and name != "lock")):
                    chosen[path, name] = older
            if loses_age and form.AGE in present[path]:
                chosen[path, form.AGE] = None
        if not _is_told(present, image, chosen, claimed[0]):
            return ""
        for place, older in chosen.items():
            _put_back(files, place, older)
        return f"{len(chosen)} files are as they were at {fault.at:.3f} s" if chosen else ""

    simulation.after(fault.lasts, _later, simulation, fault, partial(_strike, change=change))


def _is_told(present: Image, image: Image, chosen: Mapping[Place, bytes | None], claimed: int) -> bool:
    """Return whether something tells that segments were put back, if any were.

    The age does that up to the segment that it claims. So do an age that is put back, a witness that stays,
    and what stays of a later segment that was written since.
    """
    segments = [form.id_of(name, form.SEGMENT_SUFFIX) for _, name in chosen]
    first = min((each for each in segments if each is not None), default=0)
    if first <= claimed or any(name == form.AGE for _, name in chosen):
        return True
    stays = {
        name
        for path, files in present.items()
        for name, content in files.items()
        if (path, name) not in chosen and content != image.get(path, {}).get(name)
    }
    later = (
        form.id_of(name, suffix) for name in stays for suffix in (form.SEGMENT_SUFFIX, form.INDEX_SUFFIX)
    )
    return "witness" in stays or any(each is not None and each >= first for each in later)


def _put_back(files: Files, place: Place, older: bytes | None) -> None:
    if older is None:
        files.name(place, None)
        return
    if place[1] not in files.disk.directories[place[0]].entries:
        files.name(place, files.disk.new_inode())
    files.put(place, older)


def _later(simulation: Simulation, fault: Fault, strike: Callable[[Simulation, Fault], bool]) -> None:
    if not simulation.is_healed and strike(simulation, fault):
        simulation.stats[fault.kind] += 1


def _one_file(change: Callable[[Files, Place], str]) -> Callable[[Simulation, Fault], bool]:
    def on_files(files: Files) -> str:
        place = files.draw()
        return change(files, place) if place is not None else ""

    return partial(_strike, change=on_files)


@kind
def file_truncated(simulation: Simulation, fault: Fault) -> bool:
    """A file ends earlier than it did, anywhere in the part that was written."""

    def change(files: Files, place: Place) -> str:
        data = bytes(files.inode(place).data)
        used = len(data.rstrip(b"\0")) or len(data)  # a reserve has zeros
        if not used:
            return ""
        size = int(files.rng.random() * used)
        size = size // PAGE * PAGE if files.rng.random() < 0.5 else size
        files.put(place, data[:size])
        return f"{place[1]} ends at {size}"

    return _one_file(change)(simulation, fault)


@kind
def file_emptied(simulation: Simulation, fault: Fault) -> bool:
    """A file has no bytes any more."""

    def change(files: Files, place: Place) -> str:
        files.put(place, b"")
        return f"{place[1]} is empty"

    return _one_file(change)(simulation, fault)


@kind
def file_removed(simulation: Simulation, fault: Fault) -> bool:
    """A file is gone."""

    def change(files: Files, place: Place) -> str:
        files.name(place, None)
        return f"{place[1]} is gone"

    return _one_file(change)(simulation, fault)


@kind
def file_zeroed(simulation: Simulation, fault: Fault) -> bool:
    """Some pages of a file are zeros."""

    def change(files: Files, place: Place) -> str:
        pages = files.pages(place)
        if not pages:
            return ""
        first = files.rng.choice(pages)
        last = first + files.rng.choice((1, 1, 3, len(pages)))
        zeroed = [page for page in pages if first <= page < last]
        data = bytearray(files.inode(place).data)
        for page in zeroed:
            data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
        files.put(place, bytes(data))
        return f"{place[1]} has zeros in pages {zeroed}"

    return _one_file(change)(simulation, fault)


@kind
def file_pages_swapped(simulation: Simulation, fault: Fault) -> bool:
    """Two pages of a file have each other's bytes."""

    def change(files: Files, place: Place) -> str:
        pages = files.pages(place)
        if len(pages) < 2:
            return ""
        one, other = files.rng.sample(pages, 2)
        data = bytearray(files.inode(place).data)
        parts = [bytes(data[page * PAGE : (page + 1) * PAGE]) for page in (one, other)]
        data[one * PAGE : (one + 1) * PAGE], data[other * PAGE : (other + 1) * PAGE] = parts[1], parts[0]
        files.put(place, bytes(data))
        return f"{place[1]} has pages {one} and {other} in each other's place"

    return _one_file(change)(simulation, fault)


@kind
def file_duplicated(simulation: Simulation, fault: Fault) -> bool:
    """Another file of its kind is copied over a file."""

    def change(files: Files, place: Place) -> str:
        suffix = kind_of(place[1])
        others = [one for one in files.names() if kind_of(one[1]) == suffix and one != place]
        if not others:
            return ""
        other = files.rng.choice(others)
        files.put(place, bytes(files.inode(other).data))
        return f"{place[1]} is a copy of {other[1]}"

    return _one_file(change)(simulation, fault)


@kind
def file_of_another(simulation: Simulation, fault: Fault) -> bool:
    """The file of the same name of another bookie is copied over a file."""
    name = simulation.dishonest

    def change(files: Files, place: Place) -> str:
        others = [one for one in simulation.plan.bookies if one != name]
        other = simulation.disks[files.rng.choice(others)]
        found = other.directories.get(f"/{_host_of(other, simulation)}/{place[0].split('/')[2]}")
        inode = found.entries.get(place[1]) if found is not None else None
        if inode is None or inode.data == files.inode(place).data:
            return ""
        files.put(place, bytes(inode.data))
        return f"{place[1]} is the one of {_host_of(other, simulation)}"

    return _one_file(change)(simulation, fault)


def _host_of(disk: Hardware, simulation: Simulation) -> str:
    return next(name for name, one in simulation.disks.items() if one is disk)


@kind
def file_misplaced(simulation: Simulation, fault: Fault) -> bool:
    """A file has another number, or two files have each other's."""

    def change(files: Files, place: Place) -> str:
        suffix, inode = kind_of(place[1]), files.inode(place)
        number = form.id_of(place[1], suffix)
        if number is None:
            return ""
        others = [one for one in files.names() if kind_of(one[1]) == suffix and one != place]
        if others and files.rng.random() < 0.6:
            other = files.rng.choice(others)
            files.name(place, files.inode(other))
            files.name(other, inode)
            return f"{place[1]} and {other[1]} have each other's name"
        wanted = max(1, number + files.rng.choice((-1, 1, 2, 7)))
        new = (place[0], f"{wanted:016x}{suffix}")
        if any(name == new[1] for _, name in files.names()):
            return ""
        files.name(place, None)
        files.name(new, inode)
        return f"{place[1]} is called {new[1]}"

    return _one_file(change)(simulation, fault)


ONE_FILE = (
    "file_truncated",
    "file_emptied",
    "file_removed",
    "file_zeroed",
    "file_pages_swapped",
    "file_duplicated",
    "file_of_another",
    "file_misplaced",
)
"""The kinds that damage one file at one moment."""


# --- a bookie's directories ------------------------------------------------------------------------

Image = dict[str, dict[str, bytes]]
"""The files of each directory, by name."""


def image_of(disk: Hardware) -> Image:
    """Copy all directories of a bookie that does not run."""
    return {
        path: {name: bytes(inode.data) for name, inode in sorted(directory.entries.items())}
        for path, directory in sorted(disk.directories.items())
    }


def restore(disk: Hardware, image: Image) -> None:
    """Put a copy in the place of all directories, durably."""
    disk.directories.clear()
    disk.locks.clear()
    disk.last_group = disk._unproven = None
    for path, files in image.items():
        directory = disk.directories[path] = Directory()
        directory.is_durable = True
        for name, content in files.items():
            inode = disk.new_inode()
            put(inode, content)
            directory.entries[name] = directory.durable[name] = inode


def put_back(simulation: Simulation, image: Image) -> None:
    """Put a copy in the place of all directories of the bookie whose medium may lie; it must not run."""
    restore(simulation.disks[simulation.dishonest], image)
    simulation.damaged_files.append("all")
    simulation.lost_cookies = []


@kind
def directory_set_back(simulation: Simulation, fault: Fault) -> bool:
    """A bookie's directories are copied while it is down, and put back after `lasts`, with starts between."""
    name = simulation.dishonest
    if name not in simulation.served or name in simulation.wiped:
        return False
    if not simulation.stop_bookie(name, has_power=True, back_after=_BACK_AFTER_S):
        return False
    image = image_of(simulation.disks[name])

    def go_back() -> None:
        # The start after the copy has to have come to its end: before that the store knows of no later one.
        if simulation.is_healed or name not in simulation.bookies or simulation.bookies[name].stopped.done():
            return
        simulation.stop_bookie(name, has_power=True, back_after=_BACK_AFTER_S)
        put_back(simulation, image)
        simulation.history.note("fault", fault.kind, name, f"is as it was at {fault.at:.3f} s")
        simulation.stats[fault.kind] += 1

    simulation.after(max(fault.lasts, 0.6), go_back)
    return False  # counted when it strikes


@kind
def bookie_copied(simulation: Simulation, fault: Fault) -> bool:
    """A second bookie is started on a copy of a bookie's directories, of before the bookie's last start.

    The bookie goes on; or it is down when the copy is started (`amount` above 0.5), and comes back later.
    """
    name = simulation.dishonest
    if name not in simulation.served or name in simulation.wiped:
        return False
    if not simulation.stop_bookie(name, has_power=True, back_after=_BACK_AFTER_S):
        return False
    image = image_of(simulation.disks[name])

    def start() -> None:
        if simulation.is_healed or name not in simulation.bookies or simulation.bookies[name].stopped.done():
            return
        if fault.amount > 0.5:
            simulation.stop_bookie(name, has_power=True, back_after=_COPY_ALONE_S)
        simulation.history.note("fault", fault.kind, name, f"is started on a copy of {fault.at:.3f} s")
        simulation.start_copy(name, lambda disk: restore(disk, image))
        simulation.damaged_files.append("copy")
        simulation.stats[fault.kind] += 1

    simulation.after(max(fault.lasts, 0.6), start)
    return False  # counted when it strikes
