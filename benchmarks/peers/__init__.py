"""The product beside its peers: the same load, on the same disk, in turn.

Read `workloads` first (the loads), then `systems` (a system under measurement), `measuring` (one run) and
`results` (the stored figures). Maven and pip fetch Apache BookKeeper, Kafka and NATS into a cache outside the
repository (`artifacts`). Small Java programs of this project drive them (`java/`).
"""
