"""kdirect: a Kafka-compatible log that is read and written with one-sided RDMA.

This module only names what users need: the classes to work with, and every error that can reach
them.  Each name is loaded when it is first used, so that ``import kdirect`` costs next to nothing.
Type checkers read the names from ``__init__.pyi``, which keeps this package free of imports of its
own rooms.
"""

from __future__ import annotations

from kdirect.lazy_names import lazy_names as _lazy_names

__version__ = "0.1.0"

_HOME = {
    "Broker": "kdirect.broker.broker",
    "Cluster": "kdirect.local_cluster",
    "Consumer": "kdirect.client.consumer",
    "Message": "kdirect.client.message",
    "Producer": "kdirect.client.producer",
    "Reader": "kdirect.client.reader",
    "Session": "kdirect.client.session",
    "TopicPartition": "kdirect.model",
    "connect": "kdirect.client.session",
}
_ERRORS = (
    "AccessDeniedError",
    "AttemptsUnsupportedError",
    "BadTimestampError",
    "BadValueError",
    "BatchTooLargeError",
    "BrokerError",
    "BrokerUnavailableError",
    "BufferFullError",
    "ChannelError",
    "ChannelLostError",
    "ChannelRevokedError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "CoordinatorError",
    "CoordinatorLoadingError",
    "CoordinatorUnavailableError",
    "CorruptBatchError",
    "CorruptLogError",
    "CorruptObjectError",
    "CorruptMetadataError",
    "DataLossError",
    "DeliveryError",
    "DeltaError",
    "FencedLeaderEpochError",
    "FencedRunError",
    "OlderCheckpointError",
    "ForgedChannelError",
    "FormatError",
    "KdirectError",
    "LeaderNotAvailableError",
    "LogError",
    "MembershipError",
    "MissingPackageError",
    "NotControllerError",
    "NotCoordinatorError",
    "NotEnoughReplicasAfterAppendError",
    "NotEnoughReplicasError",
    "NotLeaderError",
    "NotOwnerError",
    "ObjectNotFoundError",
    "OffsetNotAvailableError",
    "OffsetOutOfRangeError",
    "ProducerFencedError",
    "ProtocolError",
    "QueueFullError",
    "QueuePairError",
    "RdmaError",
    "RemoteAccessError",
    "RemoteStorageError",
    "RemoteUnavailableError",
    "ReplicaNotAvailableError",
    "RevokedError",
    "SchemaRegistryError",
    "ShimError",
    "StaleIncarnationError",
    "StateDirectoryError",
    "StateError",
    "StateExchangeError",
    "StateLimitError",
    "StateProtocolError",
    "StorageFullError",
    "TimedOutError",
    "TopicCollisionError",
    "TopicExistsError",
    "TornBufferError",
    "TransactionAbortableError",
    "TransactionError",
    "TransportError",
    "TruncatedLogError",
    "UnknownAttemptError",
    "UnknownLeaderEpochError",
    "UnknownSchemaError",
    "UnknownTopicError",
    "UnsupportedFormatError",
    "UnsupportedPlanError",
    "UploadStoppedError",
    "VersionMismatchError",
)
_HOME |= dict.fromkeys(_ERRORS, "kdirect.errors")

__all__ = sorted([*_HOME, "__version__"])  # noqa: PLE0605 - the stub spells it out
__getattr__, __dir__ = _lazy_names(__name__, _HOME)
