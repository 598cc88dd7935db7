"""Benchmarks, fuzzing and crash runs: what takes too long, or depends too much on the machine, for a test."""
