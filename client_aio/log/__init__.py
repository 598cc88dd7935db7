"""Logs: chains of ledgers under a name, written without end, outliving their writers, cut at the front.

Read first: `client_aio.core.log_chain` (the theory), `writer` (the handle), `rolling` (from one ledger to the
next), `taking_over` (opening), `reading`. The list itself is `metadata.model.log`'s.
"""
