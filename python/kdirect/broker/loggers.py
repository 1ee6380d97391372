"""The levels of this process's loggers, as resources of type BROKER_LOGGER (KIP-412): what
`kafka-configs --entity-type broker-loggers` shows and changes.

A level lasts until the process ends.  Kafka's names of levels are used; Python has no TRACE, which
is DEBUG here.  OFF is a level above all that a request can be told of, but not set, as in Kafka.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from kdirect.broker.config_requests import DELETE, SET, Refusal, operation_of
from kdirect.format.error_codes import ErrorCode

ROOT = "root"
OFF = logging.CRITICAL + 10
_LEVELS: Mapping[str, int] = {
    "OFF": OFF,
    "FATAL": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "TRACE": logging.DEBUG,
}
_SETTABLE = tuple(name for name in _LEVELS if name != "OFF")


def levels() -> dict[str, str]:
    """Logger -> the level that is in force for it: the root's and kdirect's own."""
    names = [n for n in logging.root.manager.loggerDict if n.partition(".")[0] == "kdirect"]
    found = {ROOT: logging.root, **{n: logging.getLogger(n) for n in sorted(names)}}
    return {name: _name(logger.getEffectiveLevel()) for name, logger in found.items()}


def _name(level: int) -> str:
    return next((name for name, least in _LEVELS.items() if level >= least), "DEBUG")


def refusal(configs: Iterable[Any]) -> Refusal | None:
    """Why levels cannot be changed so."""
    known = levels()
    for c in configs:
        if c.name not in known:
            return ErrorCode.INVALID_CONFIG, f"Logger {c.name} does not exist!"
        if operation_of(c) == SET and c.value not in _SETTABLE:
            text = f"Cannot set the log level of {c.name} to {c.value}: {', '.join(_SETTABLE)}"
            return ErrorCode.INVALID_CONFIG, text
        if operation_of(c) not in (SET, DELETE):
            return ErrorCode.INVALID_REQUEST, "a level is set or deleted; it is no list"
        if operation_of(c) == DELETE and c.name == ROOT:
            text = "Removing the log level of the root logger is not allowed"
            return ErrorCode.INVALID_REQUEST, text
    return None


def change(configs: Iterable[Any]) -> None:
    """Set levels, or take them back; `refusal` has looked at them."""
    for c in configs:
        logger = logging.root if c.name == ROOT else logging.getLogger(c.name)
        logger.setLevel(_LEVELS[c.value] if operation_of(c) == SET else logging.NOTSET)
