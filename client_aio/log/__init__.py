"""Logs: chains of ledgers under a name. A log grows without end, outlives its writers, and is truncated.

Read first: `client_aio.core.log_chain` (the theory), `writer` (the handle), `roller` (from one ledger to the
next), `takeover` (opening), `reader`. `metadata.model.log` has the list of a log's ledgers.
"""
