"""Which Kafka error code an exception is, and what is logged about it."""

from __future__ import annotations

import logging

from kdirect.errors import (
    BatchTooLargeError,
    BrokerUnavailableError,
    ClosedError,
    ConfigError,
    CoordinatorError,
    CoordinatorLoadingError,
    CorruptBatchError,
    CorruptLogError,
    CorruptObjectError,
    FencedLeaderEpochError,
    KdirectError,
    LeaderNotAvailableError,
    LogError,
    NotControllerError,
    NotCoordinatorError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RdmaError,
    RefusedError,
    RemoteStorageError,
    ReplicaNotAvailableError,
    StaleIncarnationError,
    StorageFullError,
    TieredOffsetError,
    TimedOutError,
    TopicCollisionError,
    UnknownLeaderEpochError,
    UnknownTopicError,
    UnsupportedFormatError,
)
from kdirect.format import layout
from kdirect.format.error_codes import ErrorCode
from kdirect.wire.environment import SYSTEM, Environment

log = logging.getLogger("kdirect.broker")

MESSAGE_MAX = 1000
REPEAT_SECONDS = 10.0
# What a client is told by a code alone, and whoever runs the broker can do something about.
_LOGGED = (
    ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.CORRUPT_MESSAGE,
    ErrorCode.MESSAGE_TOO_LARGE,
)
DAMAGE_REMEMBERED = 1000
_logged_damage: set[str] = set()
_last_logged: dict[tuple[str, type], float] = {}


# The first class that an exception is one of says its code: subclasses before their parents.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (UnknownTopicError, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    (OffsetOutOfRangeError, ErrorCode.OFFSET_OUT_OF_RANGE),
    (TieredOffsetError, TieredOffsetError.code),
    (OffsetNotAvailableError, ErrorCode.OFFSET_NOT_AVAILABLE),
    (UnsupportedFormatError, ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
    (BatchTooLargeError, ErrorCode.MESSAGE_TOO_LARGE),
    (CorruptBatchError, ErrorCode.CORRUPT_MESSAGE),
    (CorruptLogError, ErrorCode.CORRUPT_MESSAGE),
    (CorruptObjectError, ErrorCode.CORRUPT_MESSAGE),
    (RemoteStorageError, ErrorCode.KAFKA_STORAGE_ERROR),
    (TopicCollisionError, ErrorCode.INVALID_TOPIC_EXCEPTION),
    (ConfigError, ErrorCode.INVALID_CONFIG),
    (FencedLeaderEpochError, ErrorCode.FENCED_LEADER_EPOCH),
    (UnknownLeaderEpochError, ErrorCode.UNKNOWN_LEADER_EPOCH),
    (LeaderNotAvailableError, ErrorCode.LEADER_NOT_AVAILABLE),
    (ReplicaNotAvailableError, ErrorCode.REPLICA_NOT_AVAILABLE),
    # The partition is being closed, or led elsewhere: the client looks for it again.
    (ClosedError, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (NotLeaderError, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (NotEnoughReplicasAfterAppendError, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
    (NotEnoughReplicasError, ErrorCode.NOT_ENOUGH_REPLICAS),
    (CoordinatorLoadingError, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
    (NotCoordinatorError, ErrorCode.NOT_COORDINATOR),
    (CoordinatorError, ErrorCode.COORDINATOR_NOT_AVAILABLE),
    (NotControllerError, ErrorCode.NOT_CONTROLLER),
    (StaleIncarnationError, ErrorCode.STALE_BROKER_EPOCH),
    (BrokerUnavailableError, ErrorCode.BROKER_NOT_AVAILABLE),
    (TimedOutError, ErrorCode.REQUEST_TIMED_OUT),  # it is an OSError, too
    (LogError, ErrorCode.KAFKA_STORAGE_ERROR),
    (OSError, ErrorCode.KAFKA_STORAGE_ERROR),
)

# What passes when the leader is looked for again, or asked again.
PASSING = (NotLeaderError, NotEnoughReplicasError, OffsetNotAvailableError, UnknownTopicError)


def code_of(error: BaseException) -> int:
    """The code that a client gets for an exception."""
    found = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    return ErrorCode.UNKNOWN_SERVER_ERROR if found is None else found


def access_refusal(error: BaseException) -> RefusedError:
    """What to answer to a request for RDMA access that failed."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, StorageFullError):
        return RefusedError(ErrorCode.KAFKA_STORAGE_ERROR, str(error))
    if isinstance(error, RdmaError):  # what cannot be registered can still be had over TCP
        return RefusedError(layout.ERROR_ACCESS_DISABLED, str(error))
    if isinstance(error, PASSING):
        return RefusedError(code_of(error), str(error))
    return RefusedError(ErrorCode.UNKNOWN_SERVER_ERROR, str(error))


def explain(error: BaseException, what: str, environment: Environment = SYSTEM) -> tuple[int, str]:
    """(code, message) for a client.  What is the broker's own trouble is logged, a bug with its
    stack."""
    code = code_of(error)
    if isinstance(error, CorruptLogError):
        _log_damage(str(error))
    elif code in _LOGGED and _is_news(_subject(error, what), error, environment.monotonic()):
        stack = error if code == ErrorCode.UNKNOWN_SERVER_ERROR else None
        log.error("%s failed: %s", what, error, exc_info=stack)
    text = (
        str(error)
        if isinstance(error, KdirectError | OSError)
        else f"{type(error).__name__} in the broker; see its log"
    )
    return code, text[:MESSAGE_MAX]


def _subject(error: BaseException, what: str) -> str:
    """Of what a failure counts as the same one: of objects of one partition each is named."""
    return str(error) if isinstance(error, CorruptObjectError) else what


def _log_damage(text: str) -> None:
    """Damage stays where it is, however many clients come to it: each place is logged once."""
    if text not in _logged_damage:
        if len(_logged_damage) >= DAMAGE_REMEMBERED:
            _logged_damage.clear()
        _logged_damage.add(text)
        log.error("a log is damaged: %s", text)


def _is_news(what: str, error: BaseException, now: float) -> bool:
    """Clients may repeat a failing request without a pause: the same failure is logged once in a
    while only."""
    if len(_last_logged) > 1000:
        _last_logged.clear()
    if now - _last_logged.get((what, type(error)), -REPEAT_SECONDS) < REPEAT_SECONDS:
        return False
    _last_logged[what, type(error)] = now
    return True
