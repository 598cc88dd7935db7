"""`python -m client_aio.cli` is `bookie-aio`."""

from client_aio.cli.entry import main

main()
