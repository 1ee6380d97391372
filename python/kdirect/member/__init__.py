"""A broker as a member of a cluster: the drivers that carry out what `kdirect.cluster` decides.

Law of the room: everything runs on the broker's event loop.  The metadata store answers on a thread
of its own, and is heard through the loop (`loop_store`).  No module here decides who leads or who
is in sync; those are values and pure steps of `kdirect.cluster`.  `kdirect.broker` imports this
room, never the other way round.

=================  =================================================================================
`metadata`         what a broker knows of the cluster: one immutable value
`peers`            connections to the other brokers
`membership`       this broker's part: one session after the other, and questions to the controller
`forwarding`       questions to the controller, and answers, as bytes
`producer_ids`     blocks of producer ids that no other broker gets
`remote_owner`     in which incarnations the cluster has owned its objects in remote storage
=================  =================================================================================
"""
