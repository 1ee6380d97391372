"""Which of the given options is what: an option of the query, a client setting, or a property of
Kafka's clients.

Law: pure; no I/O.  The words are rows of `kdirect.options.SPARK` and `CLIENT` and of
`kdirect.kafka_properties`; what options mean together is in `settings`.  A property of Kafka that
changes nothing is a line in the log.  An unknown name is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from kdirect.errors import ConfigError
from kdirect.kafka_properties import Effect, KafkaProperty, Use, properties_by_name
from kdirect.option_table import Option
from kdirect.options import CLIENT, SPARK

REMOTE = "kdirect.remote."
PREFIX = "kafka."
# These names mean one thing with the prefix kafka., and another as a client setting.
_OTHER_MEANING = frozenset(("send.buffer.bytes",))


def sorted_options(
    options: Mapping[str, str], room: str
) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    """The given options of the table SPARK, parsed client settings, and lines for the log.  `room`
    is ``source`` or ``sink``.  Raises ConfigError for a name that is unknown or refused there."""
    own: dict[str, str] = {}
    client: dict[str, Any] = {}
    renamed: dict[str, Any] = {}
    lines: list[str] = []
    plain = _is_plain(options)
    for name, value in options.items():
        lower = name.lower()
        if lower in _own_names() or lower.startswith(REMOTE):
            row = SPARK.find(lower)
            if row.name == "path":
                raise ConfigError(
                    "option path (or an argument of load, save or start) is not available",
                    hint="name topics with an option: subscribe for a source, topic for a sink",
                )
            if row.name == "kafka.bootstrap.servers":
                client["bootstrap.servers"] = _servers(value)
            else:
                own[lower if row.is_prefix else row.name] = value
            continue
        bare = lower.removeprefix(PREFIX)
        found = _properties().get(bare)
        if found is None or (lower == bare and not _is_known_bare(found, room)):
            if bare not in _client_names():
                raise unknown(name)
            row = CLIENT.find(_client_names()[bare])
            client[row.name] = row.parse(value)
            continue
        use = found.source if room == "source" else found.sink
        if use.effect is Effect.SETTING:
            row = CLIENT.find(use.setting or found.name)
            parsed, line = _within(row, name, value)
            (renamed if use.setting else client)[row.name] = parsed
            lines += [line] if line else []
        elif use.effect is Effect.NOTHING:
            lines.append(f"option {name} changes nothing in a {room}: {use.why}")
        else:
            lines.append(_unless_refused(found, use, name, value, room, plain))
    if "bootstrap.servers" not in client:
        raise ConfigError(
            "option kafka.bootstrap.servers is missing", hint="give host:port of the broker"
        )
    # What is given by kdirect's own name takes precedence.
    return own, renamed | client, tuple(lines)


def _unless_refused(
    found: KafkaProperty, use: Use, name: str, value: str, room: str, plain: bool
) -> str:
    """A line for the log where a refused property is harmless.  Raises ConfigError elsewhere."""
    given = str(value).strip().lower()
    if given in {text.lower() for text in use.harmless}:
        return f"option {name} changes nothing in a {room}: it asks for what happens anyway"
    if found.is_security:
        if plain:
            return f"option {name} changes nothing in a {room}: security.protocol is PLAINTEXT"
        raise _no_security(name)
    raise ConfigError(f"option {name} is not available for kdirect's {room}", hint=use.why)


def _is_plain(options: Mapping[str, str]) -> bool:
    """Whether the options say that the connection is neither encrypted nor authenticated."""
    return any(
        name.lower() in ("security.protocol", "kafka.security.protocol")
        and str(value).strip().upper() == "PLAINTEXT"
        for name, value in options.items()
    )


def _is_known_bare(found: KafkaProperty, room: str) -> bool:
    """Whether the name without the prefix kafka. is the property, and not only near to it: Spark's
    connector passes no such name to Kafka, but kdirect's client has many of them."""
    if found.name in _OTHER_MEANING:
        return False
    use = found.source if room == "source" else found.sink
    return found.name in _client_names() or use.effect is Effect.REFUSED


def _within(row: Option, name: str, value: str) -> tuple[Any, str]:
    """The parsed value of a client setting that a property of Kafka is, and a line for the log if
    Kafka admits numbers that the setting does not: the nearest one that it admits is taken."""
    if row.kind in ("int", "long", "ms", "bytes"):
        try:
            number = int(str(value).strip())
        except ValueError:
            return row.parse(value), ""
        low, high = row.low, row.high
        nearest = max(number, int(low)) if low is not None else number
        nearest = min(nearest, int(high)) if high is not None else nearest
        if nearest != number:
            return row.parse(nearest), (
                f"option {name}: {number} is out of the range of {row.name}, so it is {nearest}"
            )
    return row.parse(value), ""


def _servers(value: str) -> list[str]:
    servers: list[str] = CLIENT.find("bootstrap.servers").parse(value)
    if not servers:
        raise ConfigError(
            "option kafka.bootstrap.servers is empty", hint="give host:port of the broker"
        )
    for server in servers:
        host, _, port = server.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ConfigError(
                f"option kafka.bootstrap.servers: {server!r} is not host:port",
                hint="write for example 127.0.0.1:9092",
            )
    return servers


@cache
def _own_names() -> dict[str, str]:
    return {name.lower(): name for row in SPARK.rows for name in (row.name, *row.aliases)}


@cache
def _client_names() -> dict[str, str]:
    return {name.lower(): name for row in CLIENT.rows for name in (row.name, *row.aliases)}


@cache
def _properties() -> dict[str, KafkaProperty]:
    return properties_by_name()


def _no_security(name: str) -> ConfigError:
    return ConfigError(
        f"option {name} is not available: kdirect's client neither encrypts nor authenticates",
        hint="remove it, set kafka.security.protocol=PLAINTEXT, or use Spark's Kafka connector with"
        " this broker",
    )


def unknown(name: str) -> ConfigError:
    """The error for a name that no table has, with the nearest one."""
    lower = name.lower()
    known = _own_names() | _client_names()
    if lower.startswith(("kafka.ssl.", "kafka.sasl.", "kafka.security.")):
        return _no_security(name)
    with_prefix = {f"kafka.{n}": f"kafka.{n}" for n in (*_client_names(), *_properties())}
    if lower.startswith(PREFIX):
        known |= with_prefix
    elif PREFIX + lower in with_prefix:
        return ConfigError(f"unknown option {name!r}", hint=f"did you mean kafka.{lower}?")
    near = difflib.get_close_matches(lower, known, n=1, cutoff=0.6)
    return ConfigError(
        f"unknown option {name!r}",
        hint=f"did you mean {known[near[0]]}?" if near else "docs/options.md lists them all",
    )
