"""Several buffers, written to a transport at once.

`asyncio` joins the buffers before 3.12. Its own `writelines` of later versions goes wrong in three ways, each
in some releases:

- It tells no protocol to pause (CVE-2024-12254: 3.12.0 to 3.12.8, 3.13.0 and 3.13.1). A peer that reads
  nothing then makes the process grow without bound.
- It does not look whether the connection is lost already. It raises then, or watches a descriptor that is
  closed, and that is soon another connection's.
- An empty buffer at the end stays behind, and the event loop spins.

`write` has none of these faults. uvloop's transports do both rightly, and `writelines` copies nothing there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

GatheringWrite = Callable[[Iterable[bytes | bytearray | memoryview]], None]


def gathering_write(transport: asyncio.BaseTransport) -> GatheringWrite:
    """Return the function that writes several buffers to this transport, in order.

    It may be called until the protocol's `connection_lost`. The buffers must not change before they are sent.
    """
    # uvloop's transports are of no class of asyncio's.
    if not isinstance(transport, asyncio.Transport):
        return cast("asyncio.WriteTransport", transport).writelines
    write = transport.write
    return lambda buffers: write(b"".join(buffers))
