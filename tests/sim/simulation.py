"""One run: a whole cluster of production code on the simulated loop, network, disks and metadata store.

Owns the life of bookies and clients, the phases of a run, and its result. The phases:

1. *Chaos.* Bookies start, actors work, the plan's faults strike, until the plan's duration is over.
2. *Power cut of the whole cluster*, if the plan has one. All processes die at one moment, and any part of the
   data that was not synced is left.
3. *Healing.* All faults end and all bookies come back.
4. *Checks.* A new client recovers every ledger within a bound, reads everything twice, and asks the bookies
   what they hold. The history has checked its invariants all along.

Invariant: the same plan gives the same run. Nothing here looks at a real clock or draws from a global source.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import client_aio.client
import client_aio.core.add_window
import client_aio.ledger.writer
import metadata.model.paged_list
from bookie_aio.config import BookieConfig
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.maintenance.compactor import CompactionConfig
from bookie_aio.storage.segment.allocator import SpaceLimits
from client_aio import Client, ClientConfig, connect
from metadata.errors import BookKeeperError, CookieMismatchError, DiskFailedError, MetadataError
from metadata.ids import cookie_key
from tests.sim.checkers.after_healing import check_after_healing, check_metrics
from tests.sim.checkers.invariants import History, timeline
from tests.sim.cluster.disk import SimDisk
from tests.sim.cluster.hardware import Hardware
from tests.sim.cluster.loop import SimLoop, SimulationError
from tests.sim.cluster.metadata import MetadataFaults, SimMetadataStore, SimTree
from tests.sim.cluster.network import SimNetwork
from tests.sim.cluster.quiet import overheard, quiet
from tests.sim.cluster.remembered import remembered
from tests.sim.cluster.sequence import order_by_number
from tests.sim.cluster.wiretap import Tap
from tests.sim.faults.kinds import strike, warm
from tests.sim.faults.lasting import Lasting
from tests.sim.faults.upkeep import Upkeep
from tests.sim.workloads.ledger import ROLES, SETUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bookie_aio.server.bookie import Bookie
    from tests.sim.cluster.loop import Process
    from tests.sim.plan import Actor, Plan

PORT = 3181
_COPY = "-copy"
_DISK_FAILURES = ("eio_read", "enospc", "disk_write_error", "disk_sync_error")
RESTART_DELAY_S = 0.3
_WIPED_RESTART_DELAY_S = 3.0  # it refuses every time, and others have enough to do
SESSION_TIMEOUT_S = 2.0
HEALING_BOUND_S = 90.0
_EPOCH_MS = 1_800_000_000_000
_BATCH_BYTES_MAX = 6 * 1024  # several blocks even from small writers, and none above a small segment

CLIENT_SETTINGS: dict[str, Any] = {
    "connect_timeout_s": 0.8,
    "add_timeout_s": 1.0,
    "read_timeout_s": 1.0,
    "speculative_read_s": 0.2,
    "metadata_timeout_s": 2.0,
    "session_timeout_s": SESSION_TIMEOUT_S,
    "ensemble_change_timeout_s": 6.0,
    "replacement_retry_s": 0.3,
    "add_quorum_timeout_s": 8.0,
    "quarantine_s": 1.0,
    "long_poll_s": 2.0,
    "ledger_id_block": 4,
}


@dataclass
class Result:
    """How a run ended."""

    plan: Plan
    name: str = ""
    """Of the invariant that does not hold; empty where all do."""
    text: str = ""
    seconds: float = 0.0
    steps: int = 0
    trace: int = 0
    digest: int = 0
    """A checksum of all that happened; only of runs that are traced, or whose story is wanted."""
    stats: dict[str, int] | None = None
    story: str = ""

    @property
    def is_good(self) -> bool:
        """Return whether every invariant held."""
        return not self.name


def identity_of(host: str) -> str:
    """Return the id of the bookie that runs on a host: two hosts may have copies of one directory."""
    return host.removesuffix(_COPY)


class Simulation:
    """One run of a plan; use `run_plan`."""

    def __init__(self, plan: Plan, *, is_traced: bool = False) -> None:
        self.plan = plan
        self.stats: Counter[str] = Counter()
        self.secret = b""  # the password of those of the bounded ledgers that have one
        source = f"{plan.profile}/{plan.seed}"
        self.fault_rng = random.Random(f"{source}/faults")
        self.loop = SimLoop(random.Random(f"{source}/order"), order=plan.order, is_traced=is_traced)
        self.network = SimNetwork(self.loop, random.Random(f"{source}/network"), self.stats)
        self.history = History(lambda: self.loop.now)
        self.history.on_violation = self._stop
        self.tree = SimTree()
        self.tree.watchers.append(self.history.metadata_changed)
        self.tree.watchers.append(self.history.words.metadata_changed)
        self.shared: dict[str, Any] = {}  # what roles and checkers keep
        self.disks = {
            name: Hardware(self.loop, random.Random(f"{source}/{name}/disk"), self.stats)
            for name in plan.bookies
        }
        self.dishonest = plan.dishonest
        self.stores: dict[str, Any] = {}
        self.bookies: dict[str, Bookie] = {}
        self.ledger_ids: list[int] = []
        self._ids_by: dict[str, list[int]] = defaultdict(list)
        self._given: dict[int, str] = {}  # every ledger that was created, and by whom
        self.when_healing: list[Callable[[], None]] = []
        self.is_healed = False
        self.lasting = Lasting(self.after)
        self.upkeep = Upkeep(self)
        self.script: Callable[[Simulation], Coroutine[Any, Any, None]] | None = None
        self.wiped: dict[str, float] = {}  # when
        self.left: set[str] = set()
        """Bookies that left the cluster in order: their cookies were removed."""
        self.released: set[str] = set()
        """Those, and bookies that were told to leave for good. They need not start, and nobody needs them."""
        self.served: set[str] = set()
        """Bookies that have come to serve once: they are formatted."""
        self.is_store_set_back = False
        self.starting_at_set_back: set[str] = set()
        """Bookies that were about to start then: they may take the raise of their age for a later life."""
        self.ledgers_of_copy: list[int] = []
        """Ledgers that the copy knows to which the metadata store was set back."""
        self.lost_cookies: list[bytes] = []
        """What the cookies of the dishonest bookie were, where a directory has not its own one."""
        self.damaged_files: list[str] = []
        """What `tests.sim.faults.files` did to files of the dishonest bookie."""
        self._meta_faults: dict[str, MetadataFaults] = {}
        self._boots: Counter[str] = Counter()
        self._absent: dict[str, None] = {}  # bookies that are to stay down until something starts them
        self._rests: dict[str, float] = {}  # of bookies that are being closed: for how long
        self._ledger_waiters: list[tuple[Process, asyncio.Future[None]]] = []
        self._source = source
        delays = random.Random(f"{source}/executor")
        self.loop.executor_delay = lambda: 0.001 + delays.random() * 0.05
        self.loop.on_error = self._unexpected
        self.loop.may_be_forgotten = (BookKeeperError,)
        self.network.on_connected = lambda client, server: Tap(self.history, client, server) and None

    def _stop(self) -> None:
        self.loop.is_stopping = True

    def _unexpected(self, process: Process, error: BaseException, what: str) -> None:
        if process.is_alive:
            text = "".join(traceback.format_exception(error)[-6:])
            self.history.fail("Unexpected", f"{process}: {what}: {error!r}\n{text}")

    def overhear(self, error: BaseException, what: str) -> None:
        """Note an error that a program has logged with its traceback."""
        process = self.loop.current
        if process is not self.loop.kernel:  # which runs what finalisers of the dead ask for
            self._unexpected(process, error, what)

    # --- phases --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Play the plan."""
        plan = self.plan
        for name in plan.bookies:
            self.start_bookie(name)
        await asyncio.sleep(0.1)
        if plan.setup:
            await SETUPS[plan.setup](self)
        for actor in plan.actors:
            self.after(actor.starts_at, self.start_actor, actor)
        for fault in plan.faults:
            self.after(fault.at, strike, self, fault)
        if self.script is not None:
            await self.script(self)
        await asyncio.sleep(plan.duration)
        if plan.power_cut_at_end:
            await self._power_cut_everywhere()
        self.is_healed = True
        self.history.note("phase", "chaos is over")
        check_metrics(self)
        for actor in plan.actors:
            self.stop_client(actor.name)
        self._heal()
        await check_after_healing(self)

    async def _power_cut_everywhere(self) -> None:
        """Cut the power of all bookies at one moment, while one of them writes if that comes soon."""
        busy = asyncio.Event()
        for disk in self.disks.values():
            disk.when_busy.append(busy.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(busy.wait(), 0.5)
        self.history.note("phase", "power cut of the whole cluster")
        for name in self.plan.bookies:
            self.stop_bookie(name, has_power=False, back_after=None)

    def _heal(self) -> None:
        self.history.note("phase", "healing")
        self.lasting.forget()
        for callback in self.when_healing:
            callback()
        self.network.open_all()
        for name, faults in self._meta_faults.items():
            self._meta_faults[name] = MetadataFaults()
            faults.__dict__.update(MetadataFaults().__dict__)
        for disk in self.disks.values():
            disk.when_busy.clear()
            faults = disk.faults
            warm(faults)
            faults.slow_factor, faults.failing_reads = 1.0, 0.0
            faults.full.clear()
            faults.fail_next_sync = faults.fail_next_sync_of_names = False
            faults.fail_next_write = faults.fail_next_change = False
            faults.lose_next_write = faults.misdirect_next_write = False
        for process in self.network.processes.values():
            if process.is_paused and process.is_alive:
                self.loop.resume(process)
        for name in self.plan.bookies:
            process = self.network.processes.get(name)
            if process is None or not process.is_alive:
                self.start_bookie(name)

    def after(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """Have something done later, by nobody who can die."""
        self.loop.post(self.loop.kernel, seconds, callback, *args)

    # --- bookies -------------------------------------------------------------------------------

    def directories_of(self, name: str) -> tuple[str, ...]:
        """Return a bookie's data directories."""
        return tuple(f"/{name}/data{number}" for number in range(self.plan.directories))

    def start_bookie(self, name: str) -> None:
        """Start a bookie as its command line does; a supervisor starts it again when it ends."""
        process = self.network.processes.get(name)
        if (process is not None and process.is_alive) or (self.is_healed and name not in self.plan.bookies):
            return
        self._boots[name] += 1
        self.bookies.pop(name, None)
        self._rests.pop(name, None)
        process = self.network.boot(name)
        self.history.note(name, "boots", self._boots[name])
        self.loop.spawn(process, self._serve(name, process, self._boots[name]), f"{name} main")

    async def _serve(self, name: str, process: Process, boot: int) -> None:
        rng = random.Random(f"{self._source}/{name}/{boot}")
        store = self._open_store(name, process, rng)
        config = BookieConfig(
            bookie_id=identity_of(name),
            directories=self.directories_of(identity_of(name)),
            listen=(name, PORT),
            allow_remote_without_auth=True,
            storage=StorageConfig(
                segment_bytes=self.plan.segment_bytes,
                group_bytes_max=self.plan.segment_bytes // 3,
                short_sync_s=rng.choice((0.0, 1.0)),
                compaction=CompactionConfig(pause_s=0.2),
                space=SpaceLimits(reserve_bytes=self.plan.segment_bytes // 2, retry_s=0.5),
                live_ledgers_max=2,
                scrub=self.upkeep.scrub,
            ),
            sweep_interval_s=self.upkeep.sweep_interval_s,
            unnamed_grace_s=self.upkeep.unnamed_grace_s,
        )
        try:
            bookie = await self.upkeep.bookie.start(
                config,
                store,
                SimDisk(self.disks[name], process),
                rng=rng,
                now_ms=lambda: self._wall_ms(process),
                listen=self.loop.create_server,
            )
            self.bookies[name] = bookie
            self.served.add(name)
            self.history.note(name, "serves")
            self.history.require(
                name not in self.wiped, "WipedBookiesDoNotServe", lambda: f"{name} serves from an empty disk"
            )
            self.history.require(
                name not in self.left, "WhoLeftDoesNotServe", lambda: f"{name} serves without a cookie"
            )
            self.history.require(
                not self.lost_cookies or name != self.dishonest,
                "WhoLostItsCookieDoesNotServe",
                lambda: f"{name} serves without its cookie",
            )
            age = bookie.age
            # A damaged file of the age counts as one that is missing; the dishonest disk alone damages files.
            may_doubt = identity_of(name) == self.dishonest or self.is_store_set_back
            is_sound = may_doubt or not (age.has_lost or age.in_doubt_below)
            self.history.require(
                is_sound, "NothingWasSetBack", lambda: f"{name} takes a copy for the original"
            )
            error = await bookie.stopped
            self.history.note(name, "stopped:", repr(error))
            if not isinstance(error, CookieMismatchError):  # It was told to stop: see `self.left`.
                self._check_reason(name, error)
            await bookie.close()
        except (BookKeeperError, OSError) as error:
            self.history.note(name, "did not start:", repr(error))
            self._refused(name, error)
        except Exception as error:
            self._unexpected(process, error, f"{name} main")
        # The process ends here; its supervisor starts it again.
        self.loop.call_soon(self._ended, name, process)

    def _check_reason(self, name: str, error: BaseException | None) -> None:
        """Check that a bookie ends by itself only where some disk has failed or lied before.

        Whatever else goes wrong in its background work ends it in the same words, and must not pass for that.
        """
        has_failed = any(self.stats[each] for each in _DISK_FAILURES) or identity_of(name) == self.dishonest
        if error is not None and not has_failed:
            self.history.fail("Unexpected", f"{name} ended, and no disk has failed: {error!r}")

    def _ended(self, name: str, process: Process) -> None:
        if process.is_alive:
            self.stats["bookie_restarted_itself"] += name not in self.wiped.keys() | self.left
            self._kill(process, has_power=True)
            if name in self.wiped.keys() | self.left:
                rest = _WIPED_RESTART_DELAY_S
            else:
                rest = RESTART_DELAY_S if self.is_healed else self._rests.get(name, RESTART_DELAY_S)
            if not (self.is_healed and name not in self.plan.bookies):
                self.after(rest, self.start_bookie, name)

    def _refused(self, name: str, error: BookKeeperError | OSError) -> None:
        """Check the reason why a bookie did not start, and that one which lost its disk says so."""
        if isinstance(error, OSError):
            self._check_reason(name, error)
        elif isinstance(error, CookieMismatchError) and name in self.wiped:
            self.stats["wiped_bookie_refused"] += 1
        elif name in self.wiped and not isinstance(error, MetadataError | DiskFailedError):
            self.history.fail("WipedBookiesDoNotServe", f"{name} did not start on its empty disk: {error!r}")

    def _wall_ms(self, process: Process) -> int:
        return _EPOCH_MS + int((self.loop.now + process.clock_offset) * 1000)

    def start_copy(self, name: str, put: Callable[[Hardware], None]) -> None:
        """Start a second process under a bookie's id, on a host of its own, whose disk `put` fills."""
        twin = f"{name}{_COPY}"
        if twin not in self.disks:
            rng = random.Random(f"{self._source}/{twin}/disk")
            self.disks[twin] = Hardware(self.loop, rng, self.stats)
            put(self.disks[twin])
            self.when_healing.append(partial(self.stop_bookie, twin, has_power=True, back_after=None))
        self.start_bookie(twin)

    def is_up(self, name: str) -> bool:
        """Return whether a process of that name runs."""
        process = self.network.processes.get(name)
        return process is not None and process.is_alive

    def stop_bookie(self, name: str, *, has_power: bool, back_after: float | None) -> bool:
        """Kill a bookie, or cut its power; gives False when it is down already."""
        process = self.network.processes.get(name)
        if process is None or not process.is_alive:
            return False
        self.history.note(name, "killed" if has_power else "loses power")
        self._kill(process, has_power=has_power)
        if not has_power:
            self.disks[name].lose_power()
        if back_after is not None:
            self.after(back_after, self.start_bookie, name)
        return True

    def close_bookie(self, name: str, *, back_after: float) -> bool:
        """Have a bookie close itself in order; gives False when it does not serve."""
        bookie = self.bookies.get(name)
        if bookie is None or not self.is_up(name) or bookie.stopped.done():
            return False
        self.history.note(name, "is closed")
        self._rests[name] = back_after
        self.loop.spawn(self.network.processes[name], bookie.close(), f"{name} closes")
        return True

    def wipe(self, name: str, *, back_after: float) -> bool:
        """Take a bookie's disk away for good; its supervisor starts it on an empty one, again and again.

        It may not be formatted yet: then it has promised nothing, and is as new as its disk.
        """
        if self.wiped or self.tree.find(cookie_key(name)) is None:
            return False
        self.stop_bookie(name, has_power=False, back_after=None)
        self.after(back_after, self.start_bookie, name)
        self.wiped[name] = self.loop.now
        self.disks[name].wipe()
        return True

    def _kill(self, process: Process, *, has_power: bool) -> None:
        self.network.die(process, has_power=has_power)
        store = self.stores.get(process.name)
        if store is not None and store.process is process:
            session = store.session_id
            store.crash()
            self.after(SESSION_TIMEOUT_S, self.tree.expire, session)

    # --- clients -------------------------------------------------------------------------------

    def start_actor(self, actor: Actor) -> None:
        """Start a client process."""
        if not self.is_healed:
            self.spawn_client(actor.name, ROLES[actor.role], actor)

    def spawn_client(self, name: str, role: Callable[..., Any], *args: Any) -> Any:
        """Start a process with a connected client, for a role `role(simulation, *args, client)`."""
        process = self.network.boot(name)
        return self.loop.spawn(process, self._act(name, process, role, args), f"{name} {role.__name__}")

    async def _act(self, name: str, process: Process, role: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        rng = random.Random(f"{self._source}/{name}/client")
        store = self._open_store(name, process, rng)
        config = ClientConfig(**{**CLIENT_SETTINGS, **self.plan.client_settings})
        while True:
            try:
                client_aio.client._tokens = rng  # taken over by the call, before it opens anything
                client: Client = await connect(store, config=config, rng=rng)
                break
            except BookKeeperError as error:
                self.history.note(name, "could not connect:", repr(error))
                await asyncio.sleep(0.2)
        try:
            return await role(self, *args, client)
        except Exception as error:
            if isinstance(error, asyncio.CancelledError | SimulationError):
                raise
            self._unexpected(process, error, f"{name} {role.__name__}")
            return None

    def stop_client(self, name: str) -> bool:
        """Kill a client's process."""
        process = self.network.processes.get(name)
        if process is None or not process.is_alive:
            return False
        self.history.settle(name)
        self.history.note(name, "killed")
        self._kill(process, has_power=True)
        return True

    def created(self, who: str, ledger_id: int) -> None:
        """Note a new ledger, and wake those who wait for one."""
        self.history.note(who, "created ledger", ledger_id)
        self.given(who, ledger_id)
        self.ledger_ids.append(ledger_id)
        self._ids_by[who].append(ledger_id)
        waiters, self._ledger_waiters = self._ledger_waiters, []
        for process, waiter in waiters:
            self.loop.post(process, 0.05, waiter.set_result, None)

    def password(self, ledger_id: int) -> bytes:
        """Return what opens a bounded ledger: the run's secret where its metadata have a password."""
        metadata = self.history.ledger(ledger_id).metadata
        return self.secret if metadata is not None and metadata.password is not None else b""

    def deleting(self, ledger_id: int) -> None:
        """Note that a ledger is about to be deleted: from now on it may be gone."""
        self.history.ledger(ledger_id).may_be_deleted = True

    def given(self, who: str, ledger_id: int) -> None:
        """Check that nobody else was given this ledger's id."""
        holder = self._given.setdefault(ledger_id, who)
        self.history.require(
            holder == who,
            "IdsAreGivenOnce",
            lambda: f"{who} was given ledger {ledger_id}, which {holder} had been given",
        )

    def forget_ledgers(self, ids: list[int], *, are_others_chosen: bool) -> None:
        """Let these ids be given out again, and have nobody choose them; nor others, but if that is told.

        A client that was given one of them ends.
        """
        kept = set(self.ledger_ids).difference(ids) if are_others_chosen else set()
        for known in (self.ledger_ids, *self._ids_by.values()):
            known[:] = [one for one in known if one in kept]
        for ledger_id in ids:
            if (who := self._given.pop(ledger_id, None)) is not None:
                self.stop_client(who.partition(",")[0])

    async def newest_ledger(self, *, after: int, by: str = "") -> int:
        """Wait until there is a ledger above `after` (created by that client), and give the newest."""
        ids = self._ids_by[by] if by else self.ledger_ids
        while not ids or ids[-1] == after:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._ledger_waiters.append((self.loop.current, waiter))
            await waiter
        return ids[-1]

    # --- metadata ------------------------------------------------------------------------------

    def metadata_faults(self, name: str) -> MetadataFaults:
        """Return what is wrong with a host's link to the metadata store."""
        return self._meta_faults.setdefault(name, MetadataFaults())

    def _open_store(self, name: str, process: Process, rng: random.Random) -> SimMetadataStore:
        store = self.stores[name] = SimMetadataStore(
            self.tree,
            random.Random(f"{self._source}/{name}/{rng.random()}/store"),
            process=process,
            stats=self.stats,
            faults=self.metadata_faults(name),
            session_timeout_s=SESSION_TIMEOUT_S,
        )
        return store

    def cut_metadata(self, name: str, seconds: float, *, is_paused: bool = False) -> bool:
        """Cut a host off from the metadata store; its session ends if that lasts longer than its timeout."""
        store = self.stores.get(name)
        if store is None:
            return False
        if is_paused:
            if seconds > SESSION_TIMEOUT_S:
                self.after(SESSION_TIMEOUT_S, self._expire, name, store)
            return True
        faults = self.metadata_faults(name)

        def cut() -> None:
            if not faults.is_cut:  # or the client's session ends by the cut that it is in
                faults.is_cut, faults.cut_since = True, self.loop.now
                self.after(SESSION_TIMEOUT_S, self._expire_if_cut, name, store, faults.cut_since)

        self.lasting.begin(("meta_cut", name), seconds, cut, partial(setattr, faults, "is_cut", False))
        return True

    def _expire_if_cut(self, name: str, store: SimMetadataStore, since: float) -> None:
        faults = self.metadata_faults(name)
        if faults.is_cut and faults.cut_since == since:
            self._expire(name, store)

    def _expire(self, name: str, store: SimMetadataStore) -> None:
        process = store.process
        if not self.is_healed and self.stores.get(name) is store and process is not None and process.is_alive:
            store.expire_session()


def run_script(plan: Plan, script: Callable[[Simulation], Coroutine[Any, Any, None]]) -> Result:
    """Play a script instead of the plan's chaos; then everything as `run_plan` does, with the story."""
    return run_plan(plan, wants_story=True, script=script)


def run_plan(
    plan: Plan,
    *,
    is_traced: bool = False,
    wants_story: bool = False,
    script: Callable[[Simulation], Coroutine[Any, Any, None]] | None = None,
) -> Result:
    """Play a plan from beginning to end, and give its result. Never raises for what goes wrong in it."""
    real_clock, real_batch = client_aio.client._now_ms, client_aio.core.add_window.BATCH_BYTES_MAX
    real_turn, real_tokens = client_aio.ledger.writer._BULK_TURN_BYTES, client_aio.client._tokens
    real_time = client_aio.client._clock
    real_rows = metadata.model.paged_list.HEAD_ROWS_BYTES_MAX, metadata.model.paged_list.PAGE_ROWS_BYTES_MAX
    client_aio.core.add_window.BATCH_BYTES_MAX = client_aio.ledger.writer._BULK_TURN_BYTES = _BATCH_BYTES_MAX
    if plan.head_rows_bytes:
        _keep_in_heads(plan.head_rows_bytes, plan.head_rows_bytes // 2)
    with quiet(), remembered():
        try:
            return _play(plan, is_traced=is_traced, wants_story=wants_story, script=script)
        finally:
            client_aio.client._now_ms, client_aio.core.add_window.BATCH_BYTES_MAX = real_clock, real_batch
            client_aio.ledger.writer._BULK_TURN_BYTES, client_aio.client._tokens = real_turn, real_tokens
            client_aio.client._clock = real_time
            _keep_in_heads(*real_rows)


def _keep_in_heads(head_bytes: int, page_bytes: int) -> None:
    metadata.model.paged_list.HEAD_ROWS_BYTES_MAX, metadata.model.paged_list.PAGE_ROWS_BYTES_MAX = (
        head_bytes,
        page_bytes,
    )


def _play(plan: Plan, *, is_traced: bool, wants_story: bool, script: Any) -> Result:
    order_by_number()
    simulation = Simulation(plan, is_traced=is_traced)
    simulation.script = script
    loop = simulation.loop
    client_aio.client._now_ms = lambda: _EPOCH_MS + int(loop.now * 1000)
    client_aio.client._clock = lambda: loop.now
    result = Result(plan)
    try:
        with overheard(simulation.overhear):
            loop.run(simulation.run(), until=plan.duration + HEALING_BOUND_S)
    except SimulationError as error:
        result.name, result.text = "Liveness", str(error)
    except Exception as error:
        result.name, result.text = "Unexpected", "".join(traceback.format_exception(error))
    violation = simulation.history.violation
    if violation is not None:
        result.name, result.text = violation.name, str(violation)
    result.seconds, result.steps, result.trace = loop.now, loop.steps, loop.trace
    result.stats = dict(simulation.stats + simulation.history.counts)
    if is_traced or wants_story:
        result.digest = simulation.history.digest()
    if wants_story:
        result.story = timeline(simulation.history)
    loop.end()
    simulation.history.events.clear()  # sooner gone so than by the collector, which is off until now
    return result
