"""The messages of a process to the service manager that started it, as systemd's sd_notify(3) describes them.

Owns the socket that `NOTIFY_SOCKET` names, and when a message is sent:

    READY=1, STATUS=…        the bookie serves
    WATCHDOG=1               the event loop runs: twice in each `WATCHDOG_USEC`, from the begin on
    EXTEND_TIMEOUT_USEC=…    a start that replays a long journal is not given up while the event loop runs
    STOPPING=1               a clean stop has begun

Without `NOTIFY_SOCKET` nothing is sent. A message that cannot be sent is dropped: the manager then acts by
its own timeouts. The variables are removed, so that no process started from here speaks for this one.
"""

import asyncio
import os
import socket
from contextlib import suppress

SERVICE_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_KEEPALIVE_S = 10.0
"""Without a watchdog: the time between two messages of a start that goes on."""
_START_EXTENDED_S = 60


class ServiceManager:
    """Sends this process's state to its service manager. A context manager; its end says STOPPING=1."""

    def __init__(self) -> None:
        """Take the variables out of the environment. Every method does nothing without `NOTIFY_SOCKET`."""
        address = os.environ.pop("NOTIFY_SOCKET", "")
        # A name that begins with @ stands for a socket without a file.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        usec = os.environ.pop("WATCHDOG_USEC", "")
        is_ours = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watchdog_s = int(usec) / 1e6 if usec.isdecimal() and is_ours else 0.0
        self._is_ready = self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    def ready(self, status: str) -> None:
        """Say that the process serves; `status` is one line that `systemctl status` shows."""
        self._is_ready = True
        self._send("READY=1", f"STATUS={status}")

    def stopping(self) -> None:
        """Say that a clean stop has begun. A second call does nothing. The watchdog is still served."""
        if not self._is_stopping:
            self._send("STOPPING=1")
        self._is_stopping = True

    async def _keep_alive(self) -> None:
        while self._watchdog_s or not self._is_ready:
            if not self._is_ready:
                self._send(f"EXTEND_TIMEOUT_USEC={_START_EXTENDED_S * 1_000_000}")
            if self._watchdog_s:
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2 or _KEEPALIVE_S)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), self._address)

    async def __aenter__(self) -> "ServiceManager":
        if self._address:
            self._task = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
