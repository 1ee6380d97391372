"""What a broker's error codes mean: the exceptions, with their hints."""

from __future__ import annotations

from kdirect.errors import BrokerError, CorruptLogError, KdirectError, UnknownTopicError
from kdirect.format.error_codes import error_kind

_HINTS = {
    2: "the batch was damaged on its way, or its encoder is at fault",
    7: "the broker waited for replicas in vain; raise request.timeout.ms or look at the replicas",
    10: "raise max.message.bytes of the topic; only if no single record is that large, a lower "
    "batch.bytes helps too",
    17: "use 1 to 249 characters of a-z A-Z 0-9 . _ -",
    18: "raise segment.bytes of the topic; only if no single record is that large, a lower "
    "batch.bytes helps too",
    19: "the topic's min.insync.replicas is above its replicas in sync",
    20: "the topic's min.insync.replicas is above its replicas in sync",
    29: "ask for the right to use this topic",
    30: "ask for the right to use this group",
    31: "ask for the right to do this on the cluster",
    35: "the broker is too old or too new for this request",
    36: "choose another name, or ask for if_not_exists",
    37: "partitions must be at least 1 and can only be added",
    38: "the replication factor must be from 1 to the number of brokers",
    40: "see docs/options.md for the names and values of topic properties",
    109: "the record is in remote storage only, and the broker cannot bring it from there",
}


def broker_error(
    code: int, subject: str, detail: str | None = None, *, hint: str = ""
) -> KdirectError:
    """The exception for Kafka's error `code`.  `subject` names the thing it happened to, `detail`
    is the broker's own message."""
    kind = error_kind(code)
    if kind.name == "UNKNOWN_TOPIC_OR_PARTITION":
        return UnknownTopicError(
            f"{subject}: {detail or 'no such topic or partition'}",
            hint=hint or "check the name, or create the topic first",
        )
    return BrokerError(
        f"{subject}: {detail or kind.description.rstrip('.')} ({kind.name})",
        hint=hint or _HINTS.get(code, ""),
        code=code,
        name=kind.name,
        retriable=kind.retriable,
    )


def read_error(code: int, subject: str, detail: str | None = None) -> KdirectError:
    """`broker_error` of a request that reads: damage that the broker found in its log does not pass
    when it is asked again."""
    if error_kind(code).name == "CORRUPT_MESSAGE":
        if detail:
            return CorruptLogError(f"{subject}: {detail}")  # a kdirect broker names the remedy
        return CorruptLogError(
            f"{subject}: the log is damaged there; the broker's own log says at which position of"
            " which segment",
            hint="restore the segment from a good copy, or read past it with another offset",
        )
    return broker_error(code, subject, detail)
