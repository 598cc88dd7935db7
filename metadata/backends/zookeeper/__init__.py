"""The metadata store on a ZooKeeper ensemble."""
