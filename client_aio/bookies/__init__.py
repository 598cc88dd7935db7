"""Bookies as a client sees them: addresses, connections, and the choice of an ensemble."""
