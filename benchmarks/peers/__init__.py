"""The product beside its peers: the same load, on the same disk, in turn.

Read `workloads` first (what is done), then `systems` (what a system under measurement is), `measuring` (one
run), `results` (what is kept of it). Apache BookKeeper, Kafka and NATS are fetched with Maven and pip into a
cache outside the repository (`artifacts`) and driven by small Java programs of ours (`java/`).
"""
