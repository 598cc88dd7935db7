"""Simulation: whole clusters of production code, decided by one number, the seed (docs/SIMULATION.md).

Read first: `simulation` (one run from beginning to end) and `plan` (a run as data). Then, by folder:

- `cluster`: event loop, network, disks and metadata store;
- `faults`, `workloads` (what clients do) and `profiles` (from a seed to a plan);
- `checkers`: what must hold;
- `campaign` (many runs), `crash` (crash states of the storage engine), `mutants` (planted bugs).

`python -m tests.sim` is the command.
"""
