"""The rows of the state engine in the tables of options (`options.py`).

Law: as in `options.py`, of which this is a part.
"""

from __future__ import annotations

from kdirect.option_table import Option

# fmt: off
ENGINE_ROWS: tuple[Option, ...] = (
    Option("exchange", "enum", "rdma",
           "How executors reach each other: over RDMA, over TCP, or (auto) over RDMA where there "
           "is a path and else over TCP.",
           choices=("auto", "rdma", "tcp")),
    Option("provider", "enum", "shm",
           "The RDMA provider of the exchange: shm within one host, verbs between hosts.",
           choices=("shm", "verbs")),
    Option("epoch_bytes", "bytes", 64 << 20,
           "Input of an executor after which it sends what changed to the keys' leaders.", low=1),
    Option("block_rows", "int", 1 << 16,
           "Rows that an executor applies at a time; between two blocks it merges what has come.",
           low=1, high=1 << 16),
    Option("slots", "int", 8, "Buffers of a channel (a power of two).", low=2, high=1024),
    Option("slot_bytes", "bytes", 64 << 10,
           "The size of a buffer, with its footer.", low=4096, high=1 << 24),
    Option("state_limit", "bytes", 8 << 30,
           "Most bytes of state that one executor may map.", low=1 << 20),
    Option("fragment_limit", "bytes", 1 << 30,
           "Most bytes that the fragments of one executor may take.", low=1 << 20),
    Option("state_memory", "str", None,
           "Directory below which executors map their state; /dev/shm where the host has it."),
    Option("adaptive_ratio", "float", 3.0,
           "Rows that a new key must be expected to get in the rest of its epoch to be aggregated"
           " before it is sent; rows of other keys are sent as they are. 0: all are aggregated.",
           low=0),
    Option("starting_offsets", "enum", "earliest",
           "Where a new job begins to read.", choices=("earliest", "latest")),
    Option("batch_records", "int", None,
           "Most records of one batch, divided among the partitions. None: all that are there.",
           low=1),
    Option("trigger_interval", "ms", 0,
           "The least time from the start of one batch to the start of the next one.", low=0),
    Option("snapshot_interval", "ms", 30_000,
           "Time between two snapshots of the state, which are taken after a batch.", low=0),
    Option("listen_address", "str", "127.0.0.1",
           "Address of this host on which the coordinator listens for executors."),
    Option("advertised_address", "str", None,
           "Address by which executors reach the coordinator; listen_address if it is not given."),
    Option("stall_timeout", "ms", 120_000,
           "How long an executor that owes an answer may say nothing, or all of them may get no "
           "further, before they are held to hang and are started again; 0: for ever. A batch may "
           "take longer: executors say each second that they go on.", low=0),
    Option("start_timeout", "ms", 60_000, "How long executors may take to start.", low=1),
    Option("broker_timeout", "ms", 120_000,
           "How long a job waits for brokers that do not answer before it ends with their error.",
           low=0),
    Option("max_restarts", "int", 10,
           "How often in a row executors that died are started again without a batch between.",
           low=0),
)
# fmt: on
