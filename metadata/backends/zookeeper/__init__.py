"""The metadata store on a ZooKeeper ensemble.

Read `store` first. `session` keeps one ZooKeeper session connected; `envelope` has the stored form of a node.
"""
