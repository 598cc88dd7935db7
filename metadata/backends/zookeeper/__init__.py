"""The metadata store on a ZooKeeper ensemble.

Read `store` first. `session` keeps one ZooKeeper session connected, `registration` an ephemeral key alive;
`layout` has the stored form of a node.
"""
