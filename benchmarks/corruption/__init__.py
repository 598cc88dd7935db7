"""Random corruptions of the files of one real bookie of three, and what it answers afterwards.

    python -m benchmarks.corruption [--rounds 5000] [--seed 1] [--json FILE]

Read first: `__main__` (the campaign, its options and its table), then `states` (the directories before the
damage), `damage` (what is done to their files) and `judging` (what the bookie may answer afterwards).
"""
