"""Ledger metadata, log metadata, and the stores that hold them. Imports nothing else of the project.

A newcomer reads, in this order:

- `store`: the interface of every metadata store, and the invariants that its contract suite checks;
- `model.ledger`: the content of a ledger's metadata, and its legal transitions;
- `write_outcome`: how a write whose answer was lost is settled (rule 10);
- `backends.sqlite.store`: the shortest complete store;
- `access.ledgers`: how a client reads and changes ledgers through any store.

`errors` has the error tree of the whole project; `ids` has the form of ids and the layout of keys.
"""
