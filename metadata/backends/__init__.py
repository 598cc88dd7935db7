"""The metadata stores: ZooKeeper, one SQLite file, or memory.

A backend stores values without knowing their meaning. Read `uri` first (it opens the store that a URI names),
then `sqlite.store`, then `zookeeper.store`. `memory` is the reference for tests and simulations.
"""
