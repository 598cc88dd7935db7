"""Handlers: one module for each kind of request.

The dispatcher calls a handler as `handler(peer, request_id, request, body)`. By then the frame is decoded,
the ledger is known not to be deleted, and the request is authorised. `body` is empty except for an ADD.

A handler has these duties:

1. Rule 7: it is synchronous from the verdict on the request's term to the append that the verdict allows.
   An await between the two would let a fence be accepted in between. Only work behind a barrier is a task.
2. Rule 3: an answer about state waits for everything accepted before the request. Otherwise the answer
   could deny an entry, or state a term, that a crash then brings or takes away.
3. It answers each request once through the responder, or closes the connection with `peer.fail`.
4. It counts memory that waits for the disk with `peer.hold`, and releases the same number of bytes once.
5. It may raise `StorageError` before it has answered or begun to wait. The dispatcher answers then.
"""
