"""What of a log lies in an object store (KIP-405): which sealed segments are copied there, read
from there, and deleted there.

Law of the room: it knows logs, their files and object stores, and neither sockets nor brokers.  The
decisions are pure (`remote_log`, `remote_segments`, `copy_rules`); what carries them out runs on
threads of its own, and never on an event loop.
"""
