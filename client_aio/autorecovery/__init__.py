"""Auto recovery: ledgers get their copies back without an operator.

Read first: `client_aio.core.audit` (the decisions). Then `auditor` (finds the ledgers that lack copies, and
makes tasks), `worker` (does the tasks), and `service` (both, in one process). `survey` and
`verification` are for people: the state of the cluster, and of every copy of every entry.
"""
