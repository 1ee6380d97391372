"""The metadata store: where the brokers of a cluster keep what they must agree on.

Law of the room: a tree of versioned values, as ZooKeeper has it, and nothing of what the values
mean.  `contract.py` says what a store promises; three stores keep the promises, under one suite of
tests:

==============  =================================================================================
`local`         the files of a single broker; no other process takes part
`zookeeper`     a ZooKeeper ensemble, through kazoo; the one file that imports it
`sim`           a tree in memory with simulated time, sessions and losses, from a seed
==============  =================================================================================

The rules of a cluster are in `kdirect.cluster`, which decides and touches nothing.
"""
