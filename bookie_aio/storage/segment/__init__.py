"""Segments: their bytes, their indexes, and the files they live in."""
