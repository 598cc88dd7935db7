"""Unbounded ledgers: one ledger with many writers over time, one at a time.

Read first: `client_aio.core.takeover` (the theory), `writer` (takeover and the writer's handle), `reader`,
`paged_fragments` (the metadata that both handles use), `operations` (the client's methods).
"""
