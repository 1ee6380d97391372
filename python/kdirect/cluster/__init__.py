"""The rules of a cluster: who leads, who is in sync, what is committed, what a new leader may do.

Law of the room: it decides and touches nothing.  Each machine is a function of a state and an event
to a new state and effects; states are immutable values.  No socket, file, clock, thread or device:
drivers in the broker carry effects out and report what came of them, and a simulation or an
exhaustive search drives the same functions.

The rules are Apache Kafka's (`Kip320.tla`, KIP-101, 207, 279, 320, 497, 903, 966), over a push of
records by one-sided WRITEs (KafkaDirect §4.3.2).
"""
