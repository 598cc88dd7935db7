"""The command line, `bookie-aio`: the place where client, server and metadata are put together.

Read first: `main` (the commands and how they fail), `options` (what every command takes), `output` (tables
and JSON), then the commands: `cluster` with `processes`, `bookie`, `ledger`, `bench` with `latency`.
"""
