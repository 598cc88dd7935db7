"""Decisions of the bookie, without clock, randomness, sockets, files or `async`.

Read first: `fencing` (rule 7), then `identity` (rule 6), `authorisation` (passwords) and `long_polls`.
"""
