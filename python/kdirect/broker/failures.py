"""Which Kafka error code an exception is, and what is logged about it."""

from __future__ import annotations

import logging

from kdirect.errors import (
    ConfigError,
    CorruptBatchError,
    KdirectError,
    LogError,
    OffsetOutOfRangeError,
    UnknownTopicError,
    UnsupportedFormatError,
)
from kdirect.format.protocol import ErrorCode

log = logging.getLogger("kdirect.broker")

MESSAGE_MAX = 1000


def code_of(error: BaseException) -> int:
    """The code that a client gets for an exception."""
    if isinstance(error, UnknownTopicError):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if isinstance(error, OffsetOutOfRangeError):
        return ErrorCode.OFFSET_OUT_OF_RANGE
    if isinstance(error, UnsupportedFormatError):
        return ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT
    if isinstance(error, CorruptBatchError):
        return ErrorCode.CORRUPT_MESSAGE
    if isinstance(error, ConfigError):
        return ErrorCode.INVALID_CONFIG
    if isinstance(error, LogError | OSError):
        return ErrorCode.KAFKA_STORAGE_ERROR
    return ErrorCode.UNKNOWN_SERVER_ERROR


def explain(error: BaseException, what: str) -> tuple[int, str]:
    """(code, message) for a client.  What is the broker's own trouble is logged, a bug with its stack."""
    code = code_of(error)
    if code == ErrorCode.UNKNOWN_SERVER_ERROR:
        log.error("%s failed", what, exc_info=error)
    elif code == ErrorCode.KAFKA_STORAGE_ERROR:
        log.error("%s failed: %s", what, error)
    text = str(error) if isinstance(error, KdirectError | OSError) else f"{type(error).__name__} in the broker; see its log"
    return code, text[:MESSAGE_MAX]
