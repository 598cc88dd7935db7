"""SimNetwork: streams between named hosts, in memory, with the faults that real ones have.

Owns hosts, listening sockets, connections and the bytes on their way. Does not own when faults happen
(`tests.sim.faults.kinds`), nor what the bytes mean (`tests.sim.cluster.wiretap`).

Model:

- A connection is two independent streams, each in order and without loss while both ends live, as TCP is. A
  write is cut into segments. A segment takes a random time and never overtakes another of its stream. At most
  `_WINDOW_BYTES` of a stream are on their way or not yet taken by the peer. Further bytes wait at the sender,
  whose protocol is told to pause above its limit.
- `block(a, b)` is a black hole from a to b: bytes sent later wait until it is opened again, as TCP resends.
  Blocking one way only is a one-way partition. Connecting needs both ways.
- `cut` ends the connections between two hosts. A clean cut shows both the end of the stream; a reset loses
  the bytes on their way.
- A process that dies closes its sockets: bytes handed to the system still arrive, then a reset or an end. A
  host that loses power is silent: its peers wait until it is up again and answers with a reset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.cluster.loop import Process

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.sim.cluster.loop import SimLoop

_WINDOW_BYTES = 64 * 1024
_HIGH_BYTES = 64 * 1024
_RETRY_S = 0.3

_FIN = "fin"
_RESET = "reset"


@dataclass
class NetworkConfig:
    """Delays in seconds. `spread` multiplies the delay of a few segments, to have them reordered."""

    delay_min: float = 0.0001
    delay_max: float = 0.002
    spread_probability: float = 0.02
    spread: float = 30.0
    split_probability: float = 0.05


class Stream:
    """One direction of a connection, from the endpoint that writes to the one that reads."""

    def __init__(self, network: SimNetwork, source: Endpoint, target: Endpoint) -> None:
        self.network = network
        self.source = source
        self.target = target
        self.queue: deque[bytes | str] = deque()
        self.transit: deque[bytes | str] = deque()
        self.queued_bytes = 0
        self.window_used = 0
        self.arrives_at = 0.0
        self.is_dead = False  # nothing that is put into it arrives: one end has lost power since it was made
        self.is_ended = False
        self._is_asking = False

    def put(self, item: bytes | str) -> None:
        """Hand something to the system at the source."""
        if self.is_ended:
            return
        if isinstance(item, str):
            self.is_ended = True
        else:
            self.queued_bytes += len(item)
        self.queue.append(item)
        if not self.is_dead:
            self.pump()
        elif not self._is_asking:
            self._is_asking = True
            self._ask()

    def _ask(self) -> None:
        """Send to a host that has lost power, again and again: once it is up it answers with a reset."""
        network, source, target = self.network, self.source, self.target.host
        if source._is_lost or not source.process.is_alive:
            return
        if network.is_cut_off(source.host, target):
            network.loop.post(network.loop.kernel, _RETRY_S, self._ask)
        else:
            network.loop.post(source.process, network.delay(source.host, target), source.reset)

    def pump(self) -> None:
        """Send as much as the window and the link allow."""
        network = self.network
        rng, config, loop = network.rng, network.config, network.loop
        queue, link = self.queue, (self.source.host, self.target.host)
        while queue and not self.is_dead:
            item = queue[0]
            if link in network.blocked:
                network.hold(self)
                return
            if isinstance(item, bytes):
                room = _WINDOW_BYTES - self.window_used
                if room <= 0:
                    return
                count = min(len(item), room)
                if count > 1 and rng.random() < config.split_probability:
                    count = 1 + int(rng.random() * count)
                    network.stats["split"] += 1
                if count < len(item):
                    queue[0] = item[count:]
                    item = item[:count]
                else:
                    queue.popleft()
                self.queued_bytes -= count
                self.window_used += count
            else:
                queue.popleft()
            delay = network.delay(*link)
            now = loop.now
            self.arrives_at = max(self.arrives_at, now + delay)
            # Items pass in their order even where callbacks of one instant do not.
            self.transit.append(item)
            loop.post(self.target.process, self.arrives_at - now, self._arrive)

    def _arrive(self) -> None:
        self.target.arrived(self, self.transit.popleft())

    def consumed(self, count: int) -> None:
        """Note that the reader took bytes: the window opens."""
        self.window_used -= count
        if self.queue and not self.is_dead:
            self.go_on(0.0)

    def go_on(self, delay: float) -> None:
        """Send what waited; the program at the source is told where it still has the connection."""
        loop, source = self.network.loop, self.source
        if source._is_lost:
            loop.post(loop.kernel, delay, self.pump)
        else:
            loop.post(source.process, delay, source.window_opened)


class Endpoint(asyncio.Transport):
    """One end of a connection: the transport that a protocol gets."""

    def __init__(self, network: SimNetwork, process: Process, host: str, peer: tuple[str, int]) -> None:
        super().__init__()
        self.network = network
        self.process = process
        self.host = host
        self.peer = peer
        self.protocol: Any = None
        self.out: Stream
        self.inn: Stream
        self.peer_endpoint: Endpoint
        self.tap: Callable[[bytes], None] | None = None
        self._inbox: deque[bytes | str] = deque()
        self._is_reading = True
        self._is_closing = False
        self._is_lost = False
        self._is_paused = False
        self._high, self._low = _HIGH_BYTES, _HIGH_BYTES // 4

    def begin(self, protocol: Any) -> None:
        """Set the protocol of the endpoint."""
        self.protocol = protocol
        protocol.connection_made(self)
        if self._inbox:
            self.network.loop.call_soon(self._read)

    # --- what the protocol calls ---------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._is_closing or self._is_lost or not data:
            return
        data = bytes(data)
        if self.tap is not None:
            self.tap(data)
        self.out.put(data)
        if self.out.queued_bytes > self._high and not self._is_paused:
            self._is_paused = True
            self.network.stats["paused_writing"] += 1
            self.protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        raise AssertionError("asyncio's own writelines has faults: call metadata.transports.gathering_write")

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._is_reading = False
        if not self.out.queued_bytes:
            self._finish()

    def abort(self) -> None:
        if self._is_lost:
            return
        self._is_closing = True
        self._finish(_RESET if self._inbox else _FIN)

    def _finish(self, how: str = _FIN, error: Exception | None = None) -> None:
        """Let the peer know, and the protocol, in that order, once."""
        if self._is_lost:
            return
        self._is_lost = True
        stream = self.out
        if stream.queued_bytes:  # what the program had not handed over yet
            stream.queue.clear()
            stream.queued_bytes = 0
        stream.put(how)
        self.network.forget(self)
        self.network.loop.call_soon(self.protocol.connection_lost, error)

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._is_reading = True
            self.network.loop.call_soon(self._read)

    def is_reading(self) -> bool:
        return self._is_reading

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def get_write_buffer_size(self) -> int:
        return self.out.queued_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": self.peer, "sockname": (self.host, 0)}.get(name, default)

    def get_protocol(self) -> Any:
        return self.protocol

    # --- what the network calls, as a part of the endpoint's process -----------------------------

    def arrived(self, stream: Stream, item: bytes | str) -> None:
        """Take what has come over the stream."""
        if self._is_lost:
            if isinstance(item, bytes):
                self.network.refuse(stream)
            return
        if item == _RESET and self.protocol is not None:
            self.reset()
            return
        self._inbox.append(_FIN if item == _RESET else item)
        self._read()

    def reset(self) -> None:
        """Lose the connection, with everything that is on its way."""
        if not self._is_lost and self.protocol is not None:
            self._is_closing = True
            self.out.queue.clear()
            self.out.queued_bytes = 0
            self._finish(_RESET, ConnectionResetError("Connection reset by peer"))

    def window_opened(self) -> None:
        """Send on, and tell a protocol that was paused."""
        self.out.pump()
        if self._is_lost:
            return
        if self._is_closing and not self.out.queued_bytes:
            self._finish()
        elif self._is_paused and self.out.queued_bytes <= self._low:
            self._is_paused = False
            self.protocol.resume_writing()

    def _read(self) -> None:
        inbox = self._inbox
        while inbox and self._is_reading and not self._is_lost and self.protocol is not None:
            item = inbox[0]
            if isinstance(item, str):
                inbox.popleft()
                if not self.protocol.eof_received():
                    self.close()
                return
            size = len(item)
            room = self.protocol.get_buffer(size)
            count = len(room)
            if count < size:
                room[:] = item[:count]
                inbox[0] = item[count:]
            else:
                count = size
                room[:count] = item
                inbox.popleft()
            self.inn.consumed(count)
            self.protocol.buffer_updated(count)


class SimServer:
    """A listening socket, as `create_server` gives it."""

    def __init__(self, network: SimNetwork, process: Process, factory: Any, port: int) -> None:
        self.network = network
        self.process = process
        self.factory = factory
        self.port = port
        self.is_open = True

    @property
    def sockets(self) -> list[SimServer]:
        """Return the one socket: itself."""
        return [self]

    def getsockname(self) -> tuple[str, int]:
        """Return host and port."""
        return self.process.name, self.port

    def close(self) -> None:
        """Accept nothing more."""
        self.is_open = False

    async def wait_closed(self) -> None:
        """Return at once."""


class SimNetwork:
    """All hosts, and what lies between them. A host and the process on it have one name."""

    def __init__(self, loop: SimLoop, rng: random.Random, stats: dict[str, int]) -> None:
        self.loop = loop
        self.rng = rng
        self.stats = stats
        self.config = NetworkConfig()
        self.processes: dict[str, Process] = {}
        self.blocked: dict[tuple[str, str], None] = {}
        self.slow: dict[tuple[str, str], float] = {}
        self.without_power: dict[str, None] = {}
        self.on_connected: Callable[[Endpoint, Endpoint], None] = lambda client, server: None
        self._servers: dict[tuple[str, int], SimServer] = {}
        self._endpoints: dict[Endpoint, None] = {}
        self._held: dict[tuple[str, str], dict[Stream, None]] = {}
        loop.network = self

    def delay(self, source: str, target: str) -> float:
        """Draw how long a segment takes."""
        config, rng = self.config, self.rng
        delay = config.delay_min + rng.random() * (config.delay_max - config.delay_min)
        if rng.random() < config.spread_probability:
            delay *= config.spread
            self.stats["late_segment"] += 1
        return delay * self.slow.get((source, target), 1.0)

    # --- processes -----------------------------------------------------------------------------

    def boot(self, name: str) -> Process:
        """Start a process on its host; what is left of the former one is reset."""
        process = self.processes[name] = Process(name)
        was_off = name in self.without_power
        self.without_power.pop(name, None)
        if was_off:
            for endpoint in list(self._endpoints):
                if endpoint.inn.is_dead and endpoint.peer_endpoint.host == name:
                    delay = self.delay(name, endpoint.host) + self.rng.random() * 0.5
                    if endpoint.out.window_used:  # it sends again, and is told
                        self.loop.post(endpoint.process, delay, endpoint.reset)
        return process

    def die(self, process: Process, *, has_power: bool) -> None:
        """End a process: network first, then everything that runs."""
        name = process.name
        for endpoint in [each for each in self._endpoints if each.process is process]:
            if has_power:
                how = _RESET if endpoint._inbox or self.rng.random() < 0.5 else _FIN
                endpoint.out.queue.clear()
                endpoint.out.queued_bytes = 0
                endpoint.out.put(how)
            else:
                endpoint.out.is_dead = endpoint.inn.is_dead = True
            endpoint._is_lost = True
            del self._endpoints[endpoint]
        if not has_power:
            self.without_power[name] = None
        for key, server in list(self._servers.items()):
            if server.process is process:
                del self._servers[key]
        self.loop.kill(process)

    def refuse(self, stream: Stream) -> None:
        """Answer a segment that nobody takes with a reset."""
        source = stream.source
        if not stream.is_dead and source.process.is_alive:
            back = self.delay(stream.target.host, source.host)
            self.loop.post(source.process, back, source.reset)

    def forget(self, endpoint: Endpoint) -> None:
        """Note that an endpoint is closed."""
        self._endpoints.pop(endpoint, None)

    def is_cut_off(self, source: str, target: str) -> bool:
        """Return whether a host gets no answer from another one, whatever that would be."""
        is_blocked = (source, target) in self.blocked or (target, source) in self.blocked
        return is_blocked or target in self.without_power

    # --- connecting ----------------------------------------------------------------------------

    def listen(self, process: Process, factory: Any, host: str, port: int) -> SimServer:
        """Accept connections."""
        assert host == process.name, f"{process} cannot listen on {host}"
        if (host, port) in self._servers:
            raise OSError(98, f"address {host}:{port} is in use")
        server = self._servers[host, port] = SimServer(self, process, factory, port)
        return server

    async def connect(self, process: Process, factory: Any, host: str, port: int) -> Any:
        """Open a connection; waits for as long as the link is blocked or the host has no power."""
        made: asyncio.Future[Any] = self.loop.create_future()
        self._send_syn(process, factory, host, port, made)
        return await made

    def _send_syn(self, process: Process, factory: Any, host: str, port: int, made: Any) -> None:
        if made.done() or not process.is_alive:
            return
        there, back = (process.name, host), (host, process.name)
        if self.is_cut_off(process.name, host):
            again = self.loop.post
            self.stats["syn_lost"] += 1
            again(self.loop.kernel, _RETRY_S, self._send_syn, process, factory, host, port, made)
            return
        server = self._servers.get((host, port))
        delay = self.delay(*there)
        if server is None or not server.is_open:
            error = ConnectionRefusedError(111, f"connect to {host}:{port} refused")
            self.loop.post(process, delay + self.delay(*back), _fail, made, error)
            return
        self.loop.post(server.process, delay, self._accept, server, process, factory, made)

    def _accept(self, server: SimServer, process: Process, factory: Any, made: Any) -> None:
        if not server.is_open or not process.is_alive:
            if process.is_alive:
                self.loop.post(process, 0.001, _fail, made, ConnectionRefusedError(111, "refused"))
            return
        there = Endpoint(self, server.process, server.process.name, (process.name, 0))
        here = Endpoint(self, process, process.name, server.getsockname())
        here.out = there.inn = Stream(self, here, there)
        there.out = here.inn = Stream(self, there, here)
        here.peer_endpoint, there.peer_endpoint = there, here
        self._endpoints[there] = None
        self.on_connected(here, there)
        self.loop.post(process, self.delay(there.host, here.host), self._connected, here, factory, made)
        there.begin(server.factory())

    def _connected(self, here: Endpoint, factory: Any, made: Any) -> None:
        if made.done():  # given up meanwhile
            here._is_lost = True
            here.out.put(_FIN)
            return
        if here.inn.is_dead:
            return
        self._endpoints[here] = None
        protocol = factory()
        here.begin(protocol)
        made.set_result((here, protocol))

    # --- faults --------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """Let nothing pass from one host to another."""
        self.blocked[source, target] = None

    def open(self, source: str, target: str) -> None:
        """Let everything pass again, what waited first."""
        self.blocked.pop((source, target), None)
        for stream in self._held.pop((source, target), {}):
            stream.go_on(self.rng.random() * 0.2)

    def hold(self, stream: Stream) -> None:
        """Note that a stream has something to send over a link that is blocked."""
        held = self._held.setdefault((stream.source.host, stream.target.host), {})
        if stream not in held:
            held[stream] = None
            self.stats["black_hole_held"] += 1

    def open_all(self) -> None:
        """Let everything pass everywhere, at full speed."""
        self.slow.clear()
        for source, target in list(self.blocked):
            self.open(source, target)

    def cut(self, first: str, second: str, *, is_clean: bool) -> int:
        """End the connections between two hosts; gives how many there were."""
        count = 0
        for endpoint in list(self._endpoints):
            if {endpoint.host, endpoint.peer_endpoint.host} == {first, second}:
                count += 1
                if is_clean:
                    self.loop.post(endpoint.process, 0.0, endpoint.arrived, endpoint.inn, _FIN)
                else:
                    self.loop.post(endpoint.process, 0.0, endpoint.reset)
        return count


def _fail(made: Any, error: Exception) -> None:
    if not made.done():
        made.set_exception(error)
