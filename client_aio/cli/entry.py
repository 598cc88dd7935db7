"""The entry of `bookie-aio`: Ctrl-C ends the command silently also while its modules are imported.

Imports little itself, since Ctrl-C shows a traceback before `main` is called.
"""

import os
import signal
import sys
from typing import NoReturn

_INTERRUPTED = 130
"""`Exit.INTERRUPTED`, whose module is not imported yet."""


def main() -> NoReturn:
    """Run the command line; ends the process with a stable exit code."""
    handler = signal.getsignal(signal.SIGINT)
    is_ours = handler is signal.default_int_handler  # else the starter has it ignored
    if is_ours:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from client_aio.cli import main as command_line

    try:
        if is_ours:
            signal.signal(signal.SIGINT, handler)
        command_line.main()
    except KeyboardInterrupt:  # before or behind what `command_line` guards
        sys.exit(_INTERRUPTED)
