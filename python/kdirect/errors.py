"""The one tree of errors.

Every exception that kdirect raises on purpose is a `KdirectError`.  The message names the thing
that failed.  `hint` says what to do about it and is printed after the message.  `retriable` is True
when the same call may succeed later without a change by the user.
"""

from __future__ import annotations

from typing import Any


class KdirectError(Exception):
    """The root of all errors.  ``str()`` returns ``message; hint``."""

    retriable = False
    fatal = False  # a transactional producer cannot go on: only another one can
    txn_requires_abort = False  # the transaction can only be aborted
    # A consumer sets both on an error of one partition: its TopicPartition, and the offset at which
    # it would be read next.  (`model` imports this module, so the type cannot be named here.)
    topic_partition: Any = None
    offset: int | None = None

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple:
        # Spark pickles exceptions to carry them between processes: keep the hint.
        return (_rebuild, (type(self), self.message, self.hint, self.__dict__.copy()))


def _rebuild(cls: type[KdirectError], message: str, hint: str, state: dict) -> KdirectError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(KdirectError, ValueError):
    """An option, property or argument is unknown, missing, or has a value that is not allowed."""


class MissingPackageError(ConfigError):
    """An option needs a Python package that is not installed.  The hint has the command."""


class UnsupportedPlanError(ConfigError):
    """The state engine does not compute a DataFrame exactly as Spark does.  The message names the
    operator or expression, the hint what to write instead."""


class TopicCollisionError(ConfigError):
    """A topic's name differs from an existing one only in '.' and '_', which Kafka's metrics cannot
    distinguish."""


class FormatError(KdirectError, ValueError):
    """Bytes do not follow their format."""


class CorruptBatchError(FormatError):
    """The frame, the CRC, the place in the log or the records of a record batch are wrong."""


class BatchTooLargeError(CorruptBatchError):
    """A record batch is larger, after decompression, than its reader accepts (`max.batch.bytes`).
    The batch itself may be valid."""


class CorruptObjectError(FormatError):
    """What an object store holds of a remote segment is not what was written: a section, the
    footer, or whose segment it is.  The message names the part."""


class UnsupportedFormatError(FormatError):
    """The bytes are well-formed, but of a version or codec that this build cannot read."""


class BadValueError(FormatError):
    """The value of a record does not decode by its `valueFormat` and schema, or its event time is
    not acceptable (`mode=FAILFAST`).  `topic_partition` and `offset` say which record it is."""


class UnknownSchemaError(FormatError):
    """A value names a schema that the registry does not have.  In a query it is a value that does
    not decode."""


class BadTimestampError(FormatError):
    """The time of a record cannot be told in microseconds of 64 bits, as Spark's timestamps are:
    most likely its producer wrote microseconds or nanoseconds instead of Kafka's milliseconds.
    `topic_partition` and `offset` say which record it is."""


class SchemaRegistryError(KdirectError):
    """The schema registry cannot be reached, or refuses: the message names its address, and the
    subject or the id of the schema.  An id that it does not know is no such error, but a value that
    does not decode."""


class ProtocolError(KdirectError):
    """A peer violated the Kafka protocol or kdirect's access protocol."""


class RefusedRequestError(KdirectError):
    """Inside the broker: a request ends with this error of Kafka's, and has changed nothing."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class RdmaError(KdirectError):
    """A verbs operation could not be posted or completed."""


class QueueFullError(RdmaError):
    """The send or receive queue is full: poll completions first."""

    retriable = True


class QueuePairError(RdmaError):
    """The queue pair is not connected, is in the error state, or its peer has gone."""

    retriable = True


class ChannelError(RdmaError):
    """A channel between two processes cannot be opened, or has ended.  `peer`: the other end."""

    peer = ""


class ChannelLostError(ChannelError):
    """The process at the other end of a channel died or disconnected, or the path to it broke."""

    retriable = True


class ChannelRevokedError(ChannelError):
    """The process at the other end of a channel has ended access to its memory."""

    retriable = True


class TornBufferError(ChannelError):
    """A buffer of a channel arrived torn or damaged: its CRC-32C does not fit."""

    retriable = True


class ForgedChannelError(ChannelError):
    """The process at the other end of a channel wrote what no peer that keeps the rules writes."""


class TransportError(KdirectError):
    """No transport is usable, or the one that was required is not available."""


class LogError(KdirectError):
    """The log could not carry out a request."""


class CorruptLogError(LogError):
    """A segment, index or checkpoint on disk is damaged beyond what recovery may repair."""


class StorageFullError(LogError):
    """There is no space for a new segment."""

    retriable = True


class OffsetOutOfRangeError(LogError):
    """The offset is below the log start or above the log end."""


class TieredOffsetError(LogError):
    """The offset is in remote storage only: no record of it is kept here any more.  Kafka's
    OFFSET_MOVED_TO_TIERED_STORAGE."""

    code = 109


class TruncatedLogError(OffsetOutOfRangeError):
    """What was read is no longer in the log: its leader has other records from `diverges_at` on."""

    diverges_at = -1


class CorruptMetadataError(KdirectError):
    """A value in the metadata store of a cluster is damaged or was edited into an invalid one."""


class StoreLostError(KdirectError):
    """Inside a broker only: the connection to the metadata store was lost before it answered, so
    what was asked begins again when it is back."""

    retriable = True


class RemoteStorageError(KdirectError):
    """An object store cannot do what it was asked: no such bucket, no room, a damaged object, or a
    request that it does not know."""


class RemoteUnavailableError(RemoteStorageError):
    """An object store did not answer, or answered that it is overloaded."""

    retriable = True


class RemoteAccessError(RemoteStorageError):
    """An object store refuses access: credentials, a permission, the region or the clock."""


class ObjectNotFoundError(RemoteStorageError):
    """An object store has no object with that key."""


class NotOwnerError(RemoteStorageError):
    """The objects of this cluster in an object store belong to another broker: its log directories
    are a copy of this one's, say.  Nothing is copied or deleted there."""


class UploadStoppedError(RemoteStorageError):
    """An upload was stopped by who began it; no object appeared."""


class DataLossError(KdirectError):
    """Records that a query still had to read are gone (`failOnDataLoss`)."""


class BrokerError(KdirectError):
    """The broker answered with an error.  `code` is Kafka's error code and `name` is its name."""

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


class NotLeaderError(KdirectError):
    """Another broker leads the partition: ask for metadata again, then that broker."""

    retriable = True


class FencedLeaderEpochError(NotLeaderError):
    """The leader epoch of a request is older than the partition's: there was an election since."""


class UnknownLeaderEpochError(NotLeaderError):
    """The leader epoch of a request is newer than any that this broker has heard of yet."""


class LeaderNotAvailableError(NotLeaderError):
    """No broker leads the partition at present."""


class ReplicaNotAvailableError(NotLeaderError):
    """The broker is to keep a replica of the partition, but has not made it yet."""


class NotEnoughReplicasError(KdirectError):
    """Fewer replicas than `min.insync.replicas` are in sync; the records were not appended."""

    retriable = True


class NotEnoughReplicasAfterAppendError(NotEnoughReplicasError):
    """The records were appended, and then fewer replicas than `min.insync.replicas` were in sync:
    they may or may not be kept."""


class OffsetNotAvailableError(KdirectError):
    """A replica does not know yet how far records are committed: a leader that was just elected, or
    a follower that is asked above its high watermark."""

    retriable = True


class CoordinatorError(KdirectError):
    """A consumer group's coordinator cannot answer now."""

    retriable = True


class CoordinatorLoadingError(CoordinatorError):
    """The coordinator is reading its groups; ask again soon."""


class NotCoordinatorError(CoordinatorError):
    """Another broker coordinates the group: find the coordinator again."""


class NotControllerError(KdirectError):
    """The broker is not the controller, or the cluster has none at present."""

    retriable = True


class MembershipError(KdirectError):
    """The cluster does not take this broker: its id is in use, or its log directories are another
    cluster's."""


class StaleIncarnationError(MembershipError):
    """Another process has registered with this broker's id since this one did."""


class TopicExistsError(KdirectError):
    """A topic with that name exists already."""


class AccessDeniedError(KdirectError):
    """The broker refuses access: another producer holds it exclusively, or it is switched off."""

    retriable = True
    held = False  # another RDMA producer has it
    undecided = False  # inside the client only: the broker has not answered yet
    tiered = False  # the offset is in remote storage only, where no READ leads


class RefusedError(KdirectError):
    """Inside the broker only: the answer to a request for access is the protocol's error `code`.
    Clients raise the error that corresponds to the code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple:
        return type(self), (self.code, self.message)


class RevokedError(KdirectError):
    """Access was revoked while requests were in flight; they were not committed."""

    retriable = True


class DeliveryError(KdirectError):
    """A record could not be delivered.  `maybe_committed` says whether it may be in the log."""

    def __init__(self, message: str, *, hint: str = "", maybe_committed: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.maybe_committed = maybe_committed


class TransactionError(KdirectError):
    """A call of a transactional producer failed: it came out of order, or a coordinator refused it.
    With `fatal` set, only another producer can go on."""


class TransactionAbortableError(TransactionError):
    """The transaction failed and can only be aborted; then the producer can begin another."""

    txn_requires_abort = True


class ProducerFencedError(TransactionError):
    """Another producer with the same `transactional.id` has taken over, or the transaction took
    longer than `transaction.timeout.ms` and was aborted."""

    fatal = True


class FencedRunError(TransactionError):
    """Another run of a job writes under the same identity now.  The message names it."""

    fatal = True


class OlderCheckpointError(TransactionError):
    """A query goes on from a checkpoint that is older than what it has written exactly once.  What
    it would write now was never written, under numbers of batches that were.  Nothing is written.
    """

    fatal = True


class UnknownAttemptError(TransactionError):
    """A batch was to be committed with an attempt that is not open: it was aborted, took too long,
    or never was.  Nothing was committed."""


class AttemptsUnsupportedError(TransactionError):
    """The broker has no writes that are exactly once."""

    fatal = True


class BufferFullError(KdirectError, BufferError):
    """A producer has no room for another record because too many are not acknowledged.  The record
    was not accepted."""

    retriable = True


class StateError(KdirectError):
    """The state of a job cannot be kept, read or changed."""


class StateDirectoryError(StateError):
    """The directory of a job is in use, damaged, or belongs to another job."""


class CheckpointError(StateError):
    """The checkpoint of a query belongs to another kind of query, or is damaged."""


class CoordinatorUnavailableError(StateError):
    """The coordinator of a job cannot be reached: the job has ended, or its address is wrong."""


class StateExchangeError(StateError):
    """Executors of a job cannot reach each other, or one of them has gone."""

    retriable = True


class StateProtocolError(StateError):
    """An executor or the coordinator of a job broke their protocol, or has gone."""


class StateLimitError(StateError):
    """State has no room: it reached its limit in bytes, or its file system is full."""


class DeltaError(StateError):
    """The bytes of a delta are forged, truncated, or of another plan.  The message names the
    executor that sent them; what was not checked has changed nothing."""


class ShimError(KdirectError):
    """The JVM shim is not available; Spark reads rows instead of columns."""


class VersionMismatchError(KdirectError):
    """Two processes of a Spark query, or a jar and a Python package, have different versions of
    kdirect."""


class ClosedError(KdirectError):
    """The object is closed."""


class TimedOutError(KdirectError, TimeoutError):
    """The time limit was exceeded."""

    retriable = True
