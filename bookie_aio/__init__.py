"""The bookie: a single-threaded asyncio server that stores entries of ledgers.

Read first: `wire` (the protocol, shared with the client), then `server` (connections and requests) and
`storage` (segments, group commit, index). Of this project it imports only `metadata`.
"""
