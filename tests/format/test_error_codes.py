"""The table of Kafka's error codes, against the library's."""

from __future__ import annotations

from kafka.errors import kafka_errors

from kdirect.format.error_codes import ERRORS, ErrorCode, error_kind

# What the library calls by names that Kafka has given up, or by its own.
OLD_NAMES = {
    "UNKNOWN_SERVER_ERROR": "UNKNOWN",
    "NONE": "NO_ERROR",
    "NOT_LEADER_OR_FOLLOWER": "NOT_LEADER_FOR_PARTITION",
    "MESSAGE_TOO_LARGE": "MESSAGE_SIZE_TOO_LARGE",
    "INVALID_TOPIC_EXCEPTION": "INVALID_TOPIC",
    "INVALID_REPLICA_ASSIGNMENT": "INVALID_REPLICATION_ASSIGNMENT",
}


# What the library does not know yet.
NEW_NAMES = {128: "INVALID_REGULAR_EXPRESSION"}


def test_every_code_is_there_by_kafkas_name():
    theirs = {code: kind.message for code, kind in kafka_errors.items() if code is not None}
    assert len(theirs) > 120 and not NEW_NAMES.keys() & theirs.keys()
    theirs |= NEW_NAMES
    assert {int(x): OLD_NAMES.get(x.name, x.name) for x in ErrorCode} == theirs


def test_kinds_are_named_by_the_codes():
    assert {code: kind.name for code, kind in ERRORS.items()} == {int(x): x.name for x in ErrorCode}
    assert error_kind(6).stale and error_kind(6).retriable and not error_kind(10).retriable
    assert error_kind(9999).name == "ERROR_9999" and not error_kind(9999).retriable
