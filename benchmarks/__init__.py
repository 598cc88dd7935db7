"""Benchmarks, fuzzing and crash runs: programs too slow for a test, or too dependent on the machine."""
