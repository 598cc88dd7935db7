"""The bookies of a cluster: addresses, connections, and the choice of an ensemble."""
