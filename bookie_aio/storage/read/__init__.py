"""Reads: from the entries asked for to checked bytes."""
