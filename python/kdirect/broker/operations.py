"""What a client is told that it may do, where it asks: everything that Kafka knows of a resource,
because nobody here is refused anything (Kafka without an authorizer)."""

from __future__ import annotations

# Kafka's AclOperation by its code.
READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, CLUSTER_ACTION = range(3, 10)
DESCRIBE_CONFIGS, ALTER_CONFIGS, IDEMPOTENT_WRITE = range(10, 13)

ON_CLUSTER = frozenset(
    (
        CREATE,
        ALTER,
        DESCRIBE,
        CLUSTER_ACTION,
        DESCRIBE_CONFIGS,
        ALTER_CONFIGS,
        IDEMPOTENT_WRITE,
    )
)
ON_TOPIC = frozenset(
    (READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS)
)
ON_GROUP = frozenset((READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS))


def allowed(operations: frozenset[int], asked: bool) -> frozenset[int] | None:
    """The field of an answer: `operations`, or None where the client has not asked."""
    return operations if asked else None


def as_number(operations: frozenset[int]) -> int:
    """The same as the number that a message has whose schema does not know of bits."""
    return sum(1 << operation for operation in operations)
