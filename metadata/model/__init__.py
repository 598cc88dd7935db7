"""What is stored: the metadata of ledgers and logs, and the only ways they may change. Pure."""
