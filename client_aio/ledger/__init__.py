"""One ledger: create, write, replicate, read, recover."""
