"""What clients and brokers both need to talk to a broker.

Law of the room: it imports the rooms of bytes (`format`) and of RDMA (`rdma`), and nothing of
client, broker or log.  It knows how to reach a broker and what moves bytes there; which records
move, and what happens after a failure, is decided in the rooms above it.
"""
