"""The one tree of errors.

Every exception that kdirect raises on purpose is a `KdirectError`.  A message names the thing;
`hint` says what to do about it and is printed behind the message.  `retriable` tells callers
whether the same call may succeed later without a change by the user.
"""

from __future__ import annotations


class KdirectError(Exception):
    """Root.  ``str()`` is ``message; hint``."""

    retriable = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple:
        # Exceptions cross process borders in Spark: keep the hint.
        return (_rebuild, (type(self), self.message, self.hint, self.__dict__.copy()))


def _rebuild(cls: type[KdirectError], message: str, hint: str, state: dict) -> KdirectError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(KdirectError, ValueError):
    """An option, property or argument is unknown, missing, or has a value it may not have."""


class TopicCollisionError(ConfigError):
    """A topic's name differs from that of another only in '.' and '_', which Kafka's metrics do not
    tell apart."""


class FormatError(KdirectError, ValueError):
    """Bytes that are not what their format says."""


class CorruptBatchError(FormatError):
    """A record batch whose frame, CRC, place in the log or records are broken."""


class BatchTooLargeError(CorruptBatchError):
    """A record batch that stands for more than its reader takes (`max.batch.bytes`); it may be
    sound."""


class UnsupportedFormatError(FormatError):
    """Well-formed, but of a version or codec that this build does not read."""


class ProtocolError(KdirectError):
    """A peer broke the Kafka protocol or kdirect's access protocol."""


class RdmaError(KdirectError):
    """A verbs operation could not be posted or completed."""


class QueueFullError(RdmaError):
    """The send or receive queue is full: poll completions first."""

    retriable = True


class QueuePairError(RdmaError):
    """The queue pair is not connected, in error, or its peer has gone."""

    retriable = True


class TransportError(KdirectError):
    """No usable transport, or the one demanded cannot be had."""


class LogError(KdirectError):
    """The log could not do what was asked."""


class CorruptLogError(LogError):
    """A segment, index or checkpoint on disk is damaged beyond what recovery may repair."""


class StorageFullError(LogError):
    """No space for a new segment."""

    retriable = True


class OffsetOutOfRangeError(LogError):
    """The offset is below the log start or above the log end."""


class DataLossError(KdirectError):
    """Records that a query counted on are gone (`failOnDataLoss`)."""


class BrokerError(KdirectError):
    """The broker answered with an error.  `code` is Kafka's error code, `name` its name."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        code: int = -1,
        name: str = "UNKNOWN_SERVER_ERROR",
        retriable: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.name = name
        self.retriable = retriable


class BrokerUnavailableError(KdirectError):
    """No broker answers at the address given."""

    retriable = True


class UnknownTopicError(KdirectError):
    """The topic or partition does not exist."""


class TopicExistsError(KdirectError):
    """A topic of that name exists."""


class AccessDeniedError(KdirectError):
    """The broker refuses the access asked for (an exclusive holder exists, or it is switched off)."""

    retriable = True
    held = False  # another RDMA producer has it


class RefusedError(KdirectError):
    """Within the broker: a request for access is answered with the protocol's error `code`; clients
    raise what they make of it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple:
        return type(self), (self.code, self.message)


class RevokedError(KdirectError):
    """Access was revoked while requests were under way: they were not committed."""

    retriable = True


class DeliveryError(KdirectError):
    """A record could not be delivered.  Says whether it may have been committed."""

    def __init__(self, message: str, *, hint: str = "", maybe_committed: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.maybe_committed = maybe_committed


class BufferFullError(KdirectError, BufferError):
    """A producer has no room for another record: too much is not acknowledged.  The record was not
    taken."""

    retriable = True


class ShimError(KdirectError):
    """The JVM shim cannot be had here; Spark reads rows instead of columns."""


class ClosedError(KdirectError):
    """The object was closed."""


class TimedOutError(KdirectError, TimeoutError):
    """The time allowed ran out."""

    retriable = True
