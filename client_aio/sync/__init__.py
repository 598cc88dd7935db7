"""The client's nouns for code without an event loop: plain scripts, notebooks, Spark executors.

    with client_aio.sync.connect("sqlite:///var/lib/bookies/metadata.db") as client:
        with client.create_ledger() as ledger:
            ledger.add_entry(b"hello")                 # blocks until it is acknowledged
            ledger.add_entry_nowait(b"world")          # a concurrent.futures.Future
            ledger.flush()

One background thread per process runs one event loop, made when it is first needed; all clients share it. A
process that was forked makes its own: it must not use handles from before the fork, and gets a clear error
when it does. Nothing relies on `atexit`, since Spark's forked workers end without it: use the handles as
context managers, or close them. Clients and handles cannot be pickled; ship the URI and connect there.

Handles may be used from several threads. What the methods mean, raise and leave behind on an interrupt is
said at their namesakes in `client_aio.client`, `client_aio.ledger.writer` and `client_aio.ledger.reader`; an
interrupted call is cancelled.

Read first: `client` (what there is), `writer`, `reader`, `log` and `unbounded` (the handles), `background`
(the loop).
"""

from client_aio.sync.client import Client, LedgerReader, connect
from client_aio.sync.log import LogWriter
from client_aio.sync.unbounded import UnboundedLedgerWriter
from client_aio.sync.writer import LedgerWriter

__all__ = ["Client", "LedgerReader", "LedgerWriter", "LogWriter", "UnboundedLedgerWriter", "connect"]
