"""`python -m client_aio.cli` is `bookie-aio`."""

from client_aio.cli.main import main

main()
