"""The client and its handles for code without an event loop: plain scripts, notebooks, Spark executors.

    with client_aio.sync.connect("sqlite:///var/lib/bookies/metadata.db") as client:
        with client.create_ledger() as ledger:
            ledger.add_entry(b"hello")                 # blocks until it is acknowledged
            ledger.add_entry_nowait(b"world")          # a concurrent.futures.Future
            ledger.flush()

One background thread per process runs one event loop, made when it is first needed. All clients share it. A
forked process makes its own loop. It must not use handles from before the fork; they raise ClientClosedError
there. Nothing relies on `atexit`, since Spark's forked workers end without it: use the handles as context
managers, or close them. Clients and handles cannot be pickled; ship the URI and connect there.

Handles may be used from several threads. The methods behave and raise as those of the same name in
`client_aio.client`, `client_aio.ledger.writer` and `client_aio.ledger.reader`. An interrupted call is
cancelled, and leaves behind what a cancelled call leaves there.

Read first: `client` (the client and the reader), `writer`, `log` and `unbounded` (the other handles),
`loop_thread` (the loop), `add_future` (what the `_nowait` methods return).
"""

from client_aio.sync.client import Client, LedgerReader, connect
from client_aio.sync.writer import LedgerWriter, LogWriter, UnboundedLedgerWriter

__all__ = ["Client", "LedgerReader", "LedgerWriter", "LogWriter", "UnboundedLedgerWriter", "connect"]
