"""Which Kafka error code an exception is, and what is logged about it."""

from __future__ import annotations

import logging

from kdirect.errors import (
    BatchTooLargeError,
    ClosedError,
    ConfigError,
    CorruptBatchError,
    CorruptLogError,
    KdirectError,
    LogError,
    NotLeaderError,
    OffsetOutOfRangeError,
    RdmaError,
    RefusedError,
    StorageFullError,
    TopicCollisionError,
    UnknownTopicError,
    UnsupportedFormatError,
)
from kdirect.format import layout
from kdirect.format.protocol import ErrorCode
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


def code_of(error: BaseException) -> int:
    """The code that a client gets for an exception."""
    if isinstance(error, UnknownTopicError):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if isinstance(error, OffsetOutOfRangeError):
        return ErrorCode.OFFSET_OUT_OF_RANGE
    if isinstance(error, UnsupportedFormatError):
        return ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT
    if isinstance(error, BatchTooLargeError):
        return ErrorCode.MESSAGE_TOO_LARGE
    if isinstance(error, CorruptBatchError | CorruptLogError):
        return ErrorCode.CORRUPT_MESSAGE
    if isinstance(error, TopicCollisionError):
        return ErrorCode.INVALID_TOPIC_EXCEPTION
    if isinstance(error, ConfigError):
        return ErrorCode.INVALID_CONFIG
    # The partition is being closed, or led elsewhere: the client looks for it again.
    if isinstance(error, ClosedError | NotLeaderError):
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    if isinstance(error, LogError | OSError):
        return ErrorCode.KAFKA_STORAGE_ERROR
    return ErrorCode.UNKNOWN_SERVER_ERROR


def access_refusal(error: BaseException) -> RefusedError:
    """What to answer to a request for RDMA access that failed."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, StorageFullError):
        return RefusedError(ErrorCode.KAFKA_STORAGE_ERROR, str(error))
    if isinstance(error, RdmaError):  # what cannot be registered can still be had over TCP
        return RefusedError(layout.ERROR_ACCESS_DISABLED, str(error))
    return RefusedError(ErrorCode.UNKNOWN_SERVER_ERROR, str(error))


def explain(error: BaseException, what: str, environment: Environment = SYSTEM) -> tuple[int, str]:
    """(code, message) for a client.  What is the broker's own trouble is logged, a bug with its
    stack."""
    code = code_of(error)
    if isinstance(error, CorruptLogError):
        _log_damage(str(error))
    elif code in _LOGGED and _is_news(what, error, environment.monotonic()):
        stack = error if code == ErrorCode.UNKNOWN_SERVER_ERROR else None
        log.error("%s failed: %s", what, error, exc_info=stack)
    text = (
        str(error)
        if isinstance(error, KdirectError | OSError)
        else f"{type(error).__name__} in the broker; see its log"
    )
    return code, text[:MESSAGE_MAX]


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
