"""Ledger metadata and the stores that hold it.

Read first: `errors` (the error tree), `ledger` (what a ledger's metadata says and how it may change),
`store` (the interface every store keeps), then the stores: `memory`, `sqlite`, `zookeeper`.

This package imports nothing else of the project.
"""
