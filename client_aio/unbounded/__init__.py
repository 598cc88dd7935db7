"""Unbounded ledgers: one ledger that many write to over time, one at a time.

Read first: `client_aio.core.takeover` (the theory), `takeover` (from one writer to the next), `writer` and
`reader` (the handles), `fragments` (the metadata that both hold), `client` (what may be asked for).
"""
