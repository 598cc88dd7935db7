"""Auto recovery: ledgers get their copies back without an operator.

Read first: `client_aio.core.audit` (the decisions), `auditor` (finds the ledgers that lack copies, and makes
tasks), `worker` (does the tasks), `service` (both, in one process), `survey`
(the state of the cluster, for people).
"""
