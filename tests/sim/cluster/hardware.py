"""Hardware: the disk of one host, bytes with a page cache, and its faults.

Owns the fault model and the fault budget. The `Disk` seam in front of it is `tests.sim.cluster.disk`.

Fault model:

- A write goes to the page cache. Only a sync makes it durable. The sync of a file covers the data and the
  size written to it before the sync began.
- When power fails, any subset of the data that is not synced is on the disk. Each page of 4,096 bytes is old,
  new, or torn at sectors of 512 bytes, each old or new. A file's size is the old or the new one.
- A directory's entries need a sync of their own. Without it a creation, a removal or a renaming may or may
  not have happened, each by itself, though a renaming happens as a whole. A file whose entry is lost is lost.
- A process that is killed leaves the page cache as it is. Its content still is not durable.
- After a failed sync, the pages that it was to write count as clean and are not durable (as on Linux). A
  later sync does not write them, reads return them from the cache, and a power cut loses them.
- A failed sync of a directory does the same to names. They are shown, later syncs do not write them, and a
  power cut may take each of them back.
- EIO on a write leaves a part of it in the cache (a short write). EIO on a change of a name or a size changes
  nothing. ENOSPC comes from reserving and growing.
- EIO on a read says nothing of the stored bytes: a later read returns them.

Faults of the medium, which a bookie is to detect (rule 5): a bit flips in stored data. A write is lost, or
lands elsewhere in the file, though the disk reported it durable. The whole disk is gone ("wiped").

Fault budget, so that no run asks for the impossible:

1. At most one bookie in a run has faults of the medium, and only in runs whose ledgers all have Qa ≥ 2. So
   every acknowledged entry keeps an honest and intact replica.
2. Nothing happens to the last group of the journal while it is the last: one bookie cannot tell such damage
   from a torn write. A lost or misdirected write therefore counts only once a later group is durable. A power
   cut before that finds the write where it should be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tests.sim.cluster.loop import Process, SimLoop

_LONGEST_S = 5.0
"""A write or a sync takes no longer, however slow the disk: it would outlast the healing of all faults."""
PAGE = 4096
SECTOR = 512


class Inode:
    """A file's bytes: as the system shows them (`data`), and as they are on the medium (`durable`)."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = bytearray()
        self.durable = bytearray()
        self.dirty: dict[int, None] = {}  # pages
        self.written: dict[int, None] = {}  # pages that were ever written to, rather than reserved
        self.size_is_dirty = False
        self._syncs = 0
        self._synced_by: dict[int, int] = {}  # by page, which sync made it durable last; −1 is the size

    def write(self, buffers: Sequence[Any], offset: int) -> int:
        """Change the cache; gives the end of what was written."""
        content = b"".join(buffers)
        end = offset + len(content)
        if end > len(self.data):
            self.resize(end)
        self.data[offset:end] = content
        for page in range(offset // PAGE, (end + PAGE - 1) // PAGE):
            self.dirty[page] = self.written[page] = None
        return end

    def resize(self, size: int) -> None:
        """Cut the file, or grow it by zeros that are reserved."""
        if size < len(self.data):
            del self.data[size:]
            for page in [page for page in self.written if page * PAGE >= size]:
                del self.written[page]
        else:
            self.data.extend(bytes(size - len(self.data)))
        self.size_is_dirty = True

    def snapshot(self) -> tuple[dict[int, bytes], int, int]:
        """Return what a sync that begins now covers: dirty pages, and the size; and its number."""
        pages = {page: bytes(self.data[page * PAGE : (page + 1) * PAGE]) for page in self.dirty}
        self._syncs += 1
        return pages, len(self.data), self._syncs

    def make_durable(self, snapshot: tuple[dict[int, bytes], int, int]) -> None:
        """End a sync. A page that a later sync has made durable meanwhile stays as that one left it."""
        pages, size, number = snapshot
        durable, data, synced_by = self.durable, self.data, self._synced_by
        if synced_by.get(-1, 0) < number:
            synced_by[-1] = number
            _resize(durable, size)
        for page, content in pages.items():
            if synced_by.get(page, 0) > number or page * PAGE >= len(durable):
                continue
            synced_by[page] = number
            at = page * PAGE
            kept = content[: len(durable) - at]  # a later sync may have cut the file
            durable[at : at + len(kept)] = kept
            if data[at : at + PAGE] == content:
                self.dirty.pop(page, None)
        self.size_is_dirty = len(data) != len(durable)

    def forget_dirty(self) -> None:
        """End a sync that failed: the pages look clean from now on."""
        self.dirty.clear()
        self.size_is_dirty = False

    def lose_power(self, rng: random.Random, stats: dict[str, int]) -> None:
        """Keep what is durable, and any part of what is not."""
        kept = bytearray(self.durable)
        if self.size_is_dirty and rng.random() < 0.5:
            _resize(kept, len(self.data))
        for page in self.dirty:
            fate = rng.random()
            if fate < 0.35:
                stats["page_lost"] += 1
                continue
            torn = fate > 0.7
            for at in range(page * PAGE, (page + 1) * PAGE, SECTOR):
                if at < len(kept) and not (torn and rng.random() < 0.5):
                    part = self.data[at : min(at + SECTOR, len(kept))]
                    kept[at : at + len(part)] = part
            stats["page_torn" if torn else "page_kept"] += 1
        self.durable = kept
        self.data = bytearray(kept)
        self.dirty.clear()
        self.size_is_dirty = False
        self.written = {page: None for page in self.written if page * PAGE < len(kept)}


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


Setting = tuple[str, Inode | None]
"""A name, and the file that it is given to; None: it is taken away."""
Settings = tuple[Setting, ...]


class Directory:
    """Names of files: as the system shows them, as they are on the medium, and the changes between."""

    def __init__(self) -> None:
        self.entries: dict[str, Inode] = {}
        self.durable: dict[str, Inode] = {}
        self.changes: list[Settings] = []
        self.is_durable = False
        self._doubtful: list[tuple[Settings, bool]] = []
        """From the first change on that a failed sync was to write: all until now, and which were synced."""

    def change(self, *settings: Setting) -> None:
        """Name files, or remove names: all of these settings together or none."""
        self.changes.append(settings)
        apply(self.entries, settings)

    def end_sync(self, covered: int, *, has_failed: bool) -> None:
        """End a sync of the first changes there are: they are durable, or will not be by any later one."""
        for settings in self.changes[:covered]:
            if has_failed or self._doubtful:
                self._doubtful.append((settings, not has_failed))
            else:
                apply(self.durable, settings)
        del self.changes[:covered]

    def inodes(self) -> dict[int, Inode]:
        """Return the files that have a name here, or may have one after a power cut."""
        found = [*self.entries.values(), *self.durable.values()]
        found += [inode for settings, _ in self._doubtful for _, inode in settings if inode is not None]
        return dict(sorted((inode.number, inode) for inode in found))

    def lose_power(self, rng: random.Random) -> None:
        """Keep what is durable, and any of the changes that are not."""
        for settings, is_synced in [*self._doubtful, *((settings, False) for settings in self.changes)]:
            if is_synced or rng.random() < 0.5:
                apply(self.durable, settings)
        self.changes.clear()
        self._doubtful.clear()
        self.entries = dict(self.durable)


def apply(entries: dict[str, Inode], settings: Settings) -> None:
    """Carry out a change of names."""
    for name, inode in settings:
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode


@dataclass
class DiskFaults:
    """What is wrong with a disk now. Times are in seconds."""

    slow_factor: float = 1.0
    full: dict[str, None] = field(default_factory=dict)
    """The directories that have no space."""
    fail_next_write: bool = False
    fail_next_change: bool = False
    """Of a name or of a size."""
    fail_next_sync: bool = False
    """Of a file or of a directory."""
    fail_next_sync_of_names: bool = False
    failing_reads: float = 0.0
    lose_next_write: bool = False
    misdirect_next_write: bool = False
    cold_reads: float = 0.3  # the part of them that waits for the medium
    read_time: float = 0.0002
    write_time: tuple[float, float] = (0.0001, 0.001)
    sync_time: tuple[float, float] = (0.001, 0.012)


class Hardware:
    """The disk of one host: it outlives processes and power."""

    def __init__(self, loop: SimLoop, rng: random.Random, stats: dict[str, int]) -> None:
        self.loop = loop
        self.rng = rng
        self.stats = stats
        self.faults = DiskFaults()
        self.directories: dict[str, Directory] = {}
        self.locks: dict[str, Process] = {}
        self.record: Callable[..., None] | None = None
        self._awaited: dict[str, list[float]] = {}
        self.when_busy: list[Callable[[], None]] = []  # called once, while the next group is on its way
        self.last_group: tuple[Inode, int, int] | None = None
        self._inodes = 0
        self._journal_free_at = 0.0
        self._unproven: tuple[Inode, int, bytes, int, bytes] | None = None

    def new_inode(self) -> Inode:
        """Make an empty file without a name."""
        self._inodes += 1
        return Inode(self._inodes)

    def lose_power(self) -> None:
        """Do as the fault model says; processes on the host are to be dead by now."""
        self._restore_unproven()
        rng = self.rng
        for path, directory in list(self.directories.items()):
            if not directory.is_durable and rng.random() < 0.5:
                del self.directories[path]
                continue
            inodes = directory.inodes()
            directory.lose_power(rng)
            for inode in inodes.values():
                inode.lose_power(rng, self.stats)
        self.locks.clear()
        self._journal_free_at = 0.0

    def wipe(self) -> None:
        """Replace the disk by an empty one."""
        self.directories.clear()
        self.locks.clear()
        self.last_group = self._unproven = None

    def await_effect(self, kind: str, seconds: float) -> None:
        """Count a fault that has begun, and lasts so long, once somebody notices it."""
        self._awaited.setdefault(kind, []).append(self.loop.now + seconds)

    def noticed(self, kind: str) -> None:
        """Count the faults of a kind that are under way, and were not noticed until now."""
        for until in self._awaited.pop(kind, ()):
            if until >= self.loop.now:
                self.stats[kind] += 1

    def next_write_fails(self) -> bool:
        """Tell a write whether it is the one that is to fail."""
        return self.faults.fail_next_write and self._fails("fail_next_write", "disk_write_error")

    def next_change_fails(self) -> bool:
        """Tell a change of a name or of a size whether it is the one that is to fail."""
        if self.faults.fail_next_change:
            self.stats["disk_write_error_of_change"] += 1
            return self._fails("fail_next_change", "disk_write_error")
        return False

    def next_sync_fails(self) -> bool:
        """Tell a sync whether it is the one that is to fail."""
        return self.faults.fail_next_sync and self._fails("fail_next_sync", "disk_sync_error")

    def next_sync_of_names_fails(self) -> bool:
        """Tell a sync of a directory the same."""
        faults = self.faults
        if not (faults.fail_next_sync or faults.fail_next_sync_of_names):
            return False
        self.stats["disk_sync_error_of_directory"] += 1
        which = "fail_next_sync_of_names" if faults.fail_next_sync_of_names else "fail_next_sync"
        return self._fails(which, "disk_sync_error")

    def _fails(self, which: str, kind: str) -> bool:
        setattr(self.faults, which, False)
        self.stats[kind] += 1
        return True

    def is_full(self, directory: str) -> bool:
        """Tell somebody who needs room whether there is none."""
        if directory not in self.faults.full:
            return False
        self.noticed("disk_full")
        self.noticed("disk_full_of_several")
        return True

    def files(self, suffix: str) -> list[Inode]:
        """Return the files whose names end so, in a fixed order."""
        return [
            inode
            for _, directory in sorted(self.directories.items())
            for name, inode in sorted(directory.entries.items())
            if name.endswith(suffix) and inode.durable
        ]

    def flip_bit(self) -> bool:
        """Flip a bit of what is stored durably, but not in the last group; gives False for none to be had."""
        rng = self.rng
        if self.last_group is None:
            return False
        files = self.files(".segment") * 2 + self.files(".index") + self.files("checkpoint")
        files += [self.last_group[0]] * len(files)  # what is replayed at a start is the likeliest to matter
        if not files:
            return False
        inode = files[int(rng.random() * len(files))]
        pages = [page for page in inode.written if page * PAGE < len(inode.durable)]
        if not pages:
            return False
        page = pages[int(rng.random() * len(pages))]
        at = min(page * PAGE + int(rng.random() * PAGE), len(inode.durable) - 1)
        last, start, end = self.last_group
        if (inode is last and start - SECTOR <= at < end + SECTOR) or page in inode.dirty:
            return False
        mask = 1 << int(rng.random() * 8)
        inode.durable[at] ^= mask
        if at < len(inode.data):
            inode.data[at] ^= mask
        return True

    # --- the journal's path ----------------------------------------------------------------------

    def begin_group(self) -> float:
        """Return the delay until the next journal write begins: they are executed in order."""
        return max(self._journal_free_at - self.loop.now, 0.0)

    def group_times(self) -> tuple[float, float]:
        """Draw how long a write and its sync take, after the wait for those before."""
        faults, rng = self.faults, self.rng
        write = self.begin_group() + min(draw(rng, faults.write_time) * faults.slow_factor, _LONGEST_S)
        sync = min(draw(rng, faults.sync_time) * faults.slow_factor, _LONGEST_S)
        for callback in self.when_busy:
            # Perhaps a little later: the acknowledgement has left, or is about to.
            self.loop.post(self.loop.kernel, (write + sync) * 1.3 * rng.random(), callback)
        self.when_busy.clear()
        return write, sync

    def occupy(self, seconds: float) -> None:
        """Have the next group wait so long. Not called for a group that is written at once."""
        self._journal_free_at = self.loop.now + seconds

    def group_durable(self, inode: Inode, start: int, end: int) -> None:
        """Note that a group of the journal was reported durable: those before it may be damaged now."""
        self._damage_unproven(inode, start)
        self.last_group = (inode, start, end)

    def lie(self, inode: Inode, offset: int, before: bytes, content: bytes) -> None:
        """Lose or misdirect the group that has just been synced, once it is not the last any more."""
        faults = self.faults
        if not (faults.lose_next_write or faults.misdirect_next_write) or offset < PAGE:
            return
        if faults.misdirect_next_write:
            # Somewhere in the file that an earlier group may occupy, never the header.
            where = PAGE + SECTOR * int(self.rng.random() * max(1, (offset - PAGE) // SECTOR))
            faults.misdirect_next_write = False
        else:
            where = offset
            faults.lose_next_write = False
        self._unproven = (inode, offset, before, where, content)

    def _damage_unproven(self, next_inode: Inode, next_start: int) -> None:
        if self._unproven is None:
            return
        inode, offset, before, where, content = self._unproven
        self._unproven = None
        changes = [(offset, before)] if where == offset else [(offset, before), (where, content)]
        end = offset + len(content)
        if inode is next_inode:
            end = min(end, next_start)  # the next group begins in the zeros behind this one
        for at, part in changes:
            part = part[: max(end - at, 0)]  # not beyond: the next group lies there
            for image in (inode.durable, inode.data):
                if at + len(part) <= len(image):
                    image[at : at + len(part)] = part
        self.stats["disk_lost_write" if where == offset else "disk_misdirected_write"] += 1

    def _restore_unproven(self) -> None:
        self._unproven = None


def draw(rng: random.Random, between: tuple[float, float]) -> float:
    """Draw a time, rarely a long one."""
    low, high = between
    value = low + rng.random() * (high - low)
    return value * 20 if rng.random() < 0.01 else value
