"""Auto recovery: ledgers get their copies back without an operator.

Read first: `client_aio.core.audit` (the decisions). Then `auditor` (finds the ledgers that lack copies, and
makes tasks), `worker` (does the tasks), and `service` (both, in one process). Three
are for people. `survey` reads the state of a cluster, and `verification` every copy of every entry.
`cluster_repair` repairs all that is lacking.
"""
