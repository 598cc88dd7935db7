"""The client's decisions, pure: no clock, no randomness of its own, no sockets, no `async`.

Read first: `quorum` (write sets and coverage), `add_window` (adds in flight, LAC), `ensemble_change`. Then
`read_plan` (reads), `recovery` (closing the ledger of a dead writer), `placement` and `digest`.
"""
