"""SimLoop: an asyncio event loop whose time is virtual and whose every choice comes from a seed.

Owns time, the order of ready callbacks, and which *process* each callback belongs to. Does not own the
network (`tests.sim.cluster.network`), which it asks for connections, nor disks or metadata.

How it runs:

- A ready callback runs; when none is ready, time jumps to the next timer. Real time plays no part.
- Every callback belongs to the process whose code asked for it. A process that has died never runs again. Its
  coroutines stay at the await they had reached, and their `finally` blocks do not run, as after `kill -9`. A
  paused process collects its callbacks.
- The seed decides the order among processes.
- Within one process, `Order.FIFO` keeps the order that asyncio documents for `call_soon`. `Order.SHUFFLE`
  does not keep it, since no program may rely on it between tasks. `Order.PCT` runs by random priorities of
  tasks that change a few times in a run. That finds bugs that need few but unlikely switches (Burckhardt et
  al., 2010).

Determinism: tasks and futures hash by a number drawn in order, so that sets of them iterate alike in every
run. The garbage collector works at fixed callbacks of a run and else is off, so that finalisers run where
references end. The same seed gives the same trace in every process, for every PYTHONHASHSEED.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import heapq
import itertools
import math
import sys
import zlib
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.sim.cluster.network import SimNetwork

_UNNAMED = "-"  # asyncio would draw a number for each, which differs from run to run
_SPIN_MAX = 200_000
"""Callbacks at one instant of time, above which something runs in circles."""
_LOOKS_EVERY = 100_000
"""Callbacks; most runs have fewer, and those that do not would fill the memory with what nobody holds."""


class Order(enum.Enum):
    """How the ready callbacks of one process are ordered."""

    FIFO = "fifo"
    SHUFFLE = "shuffle"
    PCT = "pct"


_PCT, _SHUFFLE = Order.PCT, Order.SHUFFLE


class SimulationError(Exception):
    """The simulated program cannot go on; the message says who waits for what."""


class DeadlockError(SimulationError):
    """Nothing is ready and no timer is set, but the run is not over."""


class LivelockError(SimulationError):
    """Time does not pass: callbacks at one instant follow each other without end."""


class Process:
    """One operating-system process of the simulation: it can die, pause, and see its clock jump."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self.clock_offset = 0.0
        self.ready: deque[Handle] = deque()
        self.stash: list[Handle] = []  # what a paused process would have run; what a dead one never will
        self.tasks: list[SimTask] = []
        self.priority_key = -1 - zlib.crc32(name.encode())  # of what it runs outside its tasks
        self._prune_at = 64

    def __repr__(self) -> str:
        return self.name

    def keep(self, task: SimTask) -> None:
        """Hold a task for as long as the process is there, so that nothing of it is finalised early."""
        tasks = self.tasks
        tasks.append(task)
        if len(tasks) > self._prune_at:
            self.tasks = tasks = [each for each in tasks if not each.done()]
            self._prune_at = 2 * len(tasks) + 64


class Handle:
    """A callback that was asked for."""

    __slots__ = ("_cancelled", "args", "callback", "context", "is_own", "process")

    def __init__(
        self, process: Process, is_own: bool, callback: Any, args: tuple[Any, ...], context: Any
    ) -> None:
        self.process = process
        self.is_own = is_own  # a timer of the process itself, not an interrupt from outside
        self.callback = callback
        self.args = args
        self.context = context
        self._cancelled = False

    def cancel(self) -> None:
        """See `asyncio.Handle`."""
        self._cancelled = True
        self.callback = self.args = None

    def cancelled(self) -> bool:
        """See `asyncio.Handle`."""
        return self._cancelled


_new_handle = object.__new__
"""Makes a handle whose fields the caller fills in, which costs a third of what `Handle(…)` does."""


class SimFuture(asyncio.Future[Any]):
    """A future that hashes by the number it was drawn."""

    __slots__ = ("sim_id",)

    sim_id: int

    def __hash__(self) -> int:
        return self.sim_id


class SimTask(asyncio.Task[Any]):
    """A task that hashes by the number it was drawn: asyncio keeps tasks in sets."""

    __slots__ = ("process", "sim_id")

    sim_id: int
    process: Process
    ids = itertools.count()

    def __new__(cls, *args: Any, **kwargs: Any) -> SimTask:
        self = super().__new__(cls)
        self.sim_id = next(cls.ids)
        self.process = kwargs["loop"].current
        return self

    def __hash__(self) -> int:
        return self.sim_id

    @property
    def label(self) -> str:
        """Return its name, or what it runs and its number; put together only when somebody looks."""
        name = self.get_name()
        if name != _UNNAMED:
            return name
        return f"{getattr(self.get_coro(), '__qualname__', 'task')}#{self.sim_id}"


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop of a whole simulated cluster.

    Args:
        rng: decides on the order of what is ready.
        order: see the module.
        is_traced: keep a running checksum of everything that runs (`trace`).
    """

    def __init__(self, rng: random.Random, *, order: Order = Order.FIFO, is_traced: bool = False) -> None:
        self._random = rng.random
        self._order = order
        self._is_traced = is_traced
        self.now = 0.0
        """The simulation's time in seconds; processes see theirs through `time`."""
        self._until = math.inf
        self._timers: list[tuple[float, int, Handle]] = []
        self._sequence = itertools.count()
        self._future_ids = itertools.count()
        SimTask.ids = itertools.count()
        self._runnable: list[Process] = []
        self._priorities: dict[int, float] = {}
        self._changes_at = {rng.randrange(1, 4000) for _ in range(5)} if order is Order.PCT else set()
        self._generators: dict[int, Process] = {}
        self.kernel = Process("kernel")
        self.current = self.kernel
        self.network: SimNetwork | None = None
        self.executor_delay: Callable[[], float] = lambda: 0.0
        self.on_error: Callable[[Process, BaseException, str], None] = self._raise
        self.steps = 0
        self._spun_from = 0  # how many there were when time last passed
        self._looks_at = _LOOKS_EVERY
        self.trace = 0
        self.is_stopping = False
        self.may_be_forgotten: tuple[type[BaseException], ...] = (Exception,)
        """Errors of tasks and futures that nobody need look at."""
        self._is_over = False

    # --- time and order ------------------------------------------------------------------------

    def time(self) -> float:
        return self.now + self.current.clock_offset

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        actor = getattr(callback, "__self__", None)
        # A task goes on as a part of its own process, whoever woke it.
        process = actor.process if type(actor) is SimTask else self.current
        handle = _new_handle(Handle)
        handle.process, handle.is_own, handle._cancelled = process, False, False
        handle.callback, handle.args, handle.context = callback, args, context
        if process.is_alive and not process.is_paused and not self._is_over:
            ready = process.ready
            if not ready:
                self._runnable.append(process)
            ready.append(handle)
        else:
            self._make_ready(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self._at(self.now + max(delay, 0.0), Handle(self.current, True, callback, args, context))

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        when = max(when - self.current.clock_offset, self.now)
        return self._at(when, Handle(self.current, True, callback, args, context))

    def post(self, process: Process, delay: float, callback: Any, *args: Any) -> Handle:
        """Run a callback after `delay` seconds as a part of that process: an interrupt from outside."""
        handle = _new_handle(Handle)
        handle.process, handle.is_own, handle._cancelled = process, False, False
        handle.callback, handle.args, handle.context = callback, args, None
        heapq.heappush(self._timers, (self.now + delay, next(self._sequence), handle))
        return handle

    def _at(self, when: float, handle: Handle) -> Handle:
        heapq.heappush(self._timers, (when, next(self._sequence), handle))
        return handle

    def _make_ready(self, handle: Handle) -> None:
        process = handle.process
        if self._is_over:
            return
        if not process.is_alive or process.is_paused:
            process.stash.append(handle)
            return
        if not process.ready:
            self._runnable.append(process)
        process.ready.append(handle)

    def _take_by_priority(self) -> Handle:
        best, best_key, best_place, best_index = -2.0, 0, 0, 0  # below all priorities
        priorities = self._priorities
        for place, process in enumerate(self._runnable):
            for index, handle in enumerate(process.ready):
                actor = getattr(handle.callback, "__self__", None)
                key = actor.sim_id if type(actor) is SimTask else process.priority_key
                priority = priorities.get(key)
                if priority is None:
                    priority = priorities[key] = self._random()
                if priority > best:
                    best, best_key, best_place, best_index = priority, key, place, index
        if self.steps in self._changes_at:
            priorities[best_key] = -self._random()
        process = self._runnable[best_place]
        handle = process.ready[best_index]
        del process.ready[best_index]
        if not process.ready:
            del self._runnable[best_place]
        return handle

    def _pass_time(self) -> Handle | None:
        """Jump to the next timer. Gives the one thing that is due then, or makes ready all that are."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise DeadlockError(f"nothing will ever happen again\n{self.describe_waiting()}")
        when, _, due = heapq.heappop(timers)
        if when > self.now:
            self.now, self._spun_from = when, self.steps
            if when > self._until:
                raise SimulationError(f"not over after {self._until:g} s\n{self.describe_waiting()}")
        process = due.process
        is_alone = not timers or timers[0][0] > when
        if is_alone and process.is_alive and not process.is_paused and self._order is not _PCT:
            return due  # there is nothing to choose
        self._make_ready(due)
        while timers and timers[0][0] <= when:
            due = heapq.heappop(timers)[2]
            if not due._cancelled:
                self._make_ready(due)
        return None

    def _go_on(self, task: SimTask) -> None:
        """Run one callback after another, as the seed has it, until the task is done or somebody stops it.

        One long function: this is most of what the simulator itself costs, and calls would be much of it.
        """
        runnable, random = self._runnable, self._random
        note = self._note if self._is_traced else None
        shuffles = self._order is _SHUFFLE
        take_by_priority = self._take_by_priority if self._order is _PCT else None
        while not self.is_stopping and not task.done():
            if not runnable:
                handle = self._pass_time()
                if handle is None:
                    continue
            elif take_by_priority is not None:
                if len(runnable) > 1:
                    random()  # as for the others; what a seed brings about depends on each draw
                handle = take_by_priority()
            else:
                count = len(runnable)
                index = int(random() * count) if count > 1 else 0
                ready = runnable[index].ready
                if shuffles and len(ready) > 1:
                    chosen = int(random() * len(ready))
                    ready[0], ready[chosen] = ready[chosen], ready[0]
                handle = ready.popleft()
                if not ready:
                    runnable[index] = runnable[-1]
                    runnable.pop()
            if handle._cancelled:
                continue
            self.steps += 1
            if self.steps >= self._looks_at:
                self._look()
            self.current = handle.process
            if note is not None:
                note(handle)
            try:
                context = handle.context
                if context is None:
                    handle.callback(*handle.args)
                else:
                    context.run(handle.callback, *handle.args)
            except (KeyboardInterrupt, SystemExit, SimulationError):
                raise
            except BaseException as error:
                self.on_error(handle.process, error, "a callback raised")

    def _look(self) -> None:
        """Look now and then whether time passes, and collect garbage, always at the same callbacks."""
        self._looks_at += _LOOKS_EVERY
        self.current = self.kernel  # for what finalisers ask for
        spun = self.steps - self._spun_from
        if spun > _SPIN_MAX:
            raise LivelockError(f"{spun:,} callbacks at {self.now:.6f} s\n{self.describe_waiting()}")
        gc.collect()

    def _note(self, handle: Handle) -> None:
        callback = handle.callback
        actor = getattr(callback, "__self__", None)
        name = actor.label if isinstance(actor, SimTask) else getattr(callback, "__qualname__", "?")
        self.trace = zlib.crc32(f"{self.now!r} {handle.process.name} {name}".encode(), self.trace)

    # --- running -------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, Any], *, until: float) -> Any:
        """Run a coroutine as a part of the kernel to its end, and give what it returns.

        Raises:
            DeadlockError: it waits, and nothing will ever happen.
            SimulationError: it is not done at the virtual time `until`.
        """
        asyncio._set_running_loop(self)
        self._until = until
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generator_begins, finalizer=self._generator_ends)
        try:
            task = self.create_task(main)
            self._go_on(task)
            return task.result() if task.done() else None
        finally:
            self.current = self.kernel
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)

    def end(self) -> None:
        """End the simulation: nothing runs any more, whatever finalisers still ask for."""
        self._is_over = True
        self._timers.clear()
        self._runnable.clear()

    def _generator_begins(self, generator: Any) -> None:
        self._generators[id(generator)] = self.current

    def _generator_ends(self, generator: Any) -> None:
        process = self._generators.pop(id(generator), self.kernel)
        if process.is_alive and not self._is_over:
            self.post(process, 0.0, lambda: self.create_task(generator.aclose()))

    def describe_waiting(self) -> str:
        """Say who waits for what: every unfinished task of every living process."""
        lines = [
            f"  {process.name}: {task.label} waits {_where(task)}"
            for process in self._processes()
            for task in process.tasks
            if not task.done()
        ]
        return "\n".join(lines)

    def _processes(self) -> list[Process]:
        network = self.network
        known = [] if network is None else list(network.processes.values())
        return [self.kernel, *[process for process in known if process.is_alive]]

    @staticmethod
    def _raise(process: Process, error: BaseException, what: str) -> None:
        raise SimulationError(f"{process.name}: {what}: {error!r}") from error

    # --- processes -----------------------------------------------------------------------------

    def spawn(self, process: Process, main: Coroutine[Any, Any, Any], name: str) -> SimTask:
        """Start a task in a process."""
        before, self.current = self.current, process
        try:
            return self.create_task(main, name=name)
        finally:
            self.current = before

    def kill(self, process: Process) -> None:
        """End a process where it stands: nothing of it ever runs again."""
        process.is_alive = False
        if process.ready:
            process.stash += process.ready
            process.ready = deque()
            self._runnable[:] = [each for each in self._runnable if each is not process]

    def pause(self, process: Process) -> None:
        """Do as SIGSTOP does."""
        process.is_paused = True
        if process.ready:
            process.stash += process.ready
            process.ready = deque()
            self._runnable[:] = [each for each in self._runnable if each is not process]

    def resume(self, process: Process) -> None:
        """Do as SIGCONT does: what was due meanwhile runs now."""
        process.is_paused = False
        stash, process.stash = process.stash, []
        for handle in stash:
            self._make_ready(handle)

    def jump_clock(self, process: Process, seconds: float) -> None:
        """Let a process's clocks jump ahead: its timers are due that much earlier."""
        process.clock_offset += seconds
        moved = [
            (max(when - seconds, self.now) if handle.is_own and handle.process is process else when, *rest)
            for when, *rest in self._timers
            for handle in rest[1:]
        ]
        heapq.heapify(moved)
        self._timers[:] = moved

    # --- tasks and futures ---------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        future = SimFuture(loop=self)
        future.sim_id = next(self._future_ids)
        return future

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> SimTask:
        # Python 3.11 runs a generator too, and asyncio makes one there; 3.12 refuses each.
        if not isinstance(coro, Coroutine) and coro.__name__ != "_wrap_awaitable":
            raise TypeError(f"a coroutine was expected, got {coro!r}")
        name = name or _UNNAMED
        if context is None:
            task = SimTask(coro, loop=self, name=name)
        else:
            task = SimTask(coro, loop=self, name=name, context=context)
        task._log_destroy_pending = False
        self.current.keep(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = self.create_future()

        def call() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.post(self.current, self.executor_delay(), call)
        return future

    # --- connections ---------------------------------------------------------------------------

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        assert self.network is not None
        return await self.network.connect(self.current, protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        assert self.network is not None
        return self.network.listen(self.current, protocol_factory, host, port)

    # --- the rest of the interface -------------------------------------------------------------

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._is_over

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error, what = context.get("exception"), context.get("message", "")
        if self._is_over or error is None:
            return
        if "never retrieved" not in what or not isinstance(error, self.may_be_forgotten):
            self.on_error(self.current, error, what)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def _timer_handle_cancelled(self, handle: Any) -> None:
        pass


def _where(task: SimTask) -> str:
    """Say at which line of which coroutine a task waits, innermost last."""
    places = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is None:
            break
        name = frame.f_code.co_filename.rpartition("/")[2]
        places.append(f"{frame.f_code.co_qualname} ({name}:{frame.f_lineno})")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    with contextlib.suppress(Exception):
        if coroutine is not None:
            places.append(repr(coroutine)[:120])
    return "in " + " → ".join(places[-3:])
