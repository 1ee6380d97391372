"""Properties that were changed while the broker ran, of what is no topic: brokers, groups, and
subscriptions to clients' metrics.

Owns: ``properties.json`` in the first log directory of a broker that is alone, and what it says.
The file is replaced whole, so a crash leaves the old or the new one.  (Those of a cluster are in
the metadata store: `member_properties`.)

Looking needs no lock; any thread may.  Changing is file work: it runs on one thread at a time, the
broker's admin thread.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdirect.cleaner_options import DYNAMIC_CLEANER
from kdirect.errors import ConfigError, CorruptLogError, LogError
from kdirect.log.checkpoint import replace_file
from kdirect.option_table import Options
from kdirect.options import BROKER, CLIENT_METRICS, DYNAMIC_LOG, GROUP
from kdirect.remote_options import DYNAMIC_REMOTE
from kdirect.sasl_options import DYNAMIC_SASL
from kdirect.thread_options import DYNAMIC_THREADS

log = logging.getLogger("kdirect.broker")

PROPERTIES_FILE = "properties.json"
ALL_BROKERS = ""
_THROTTLES = frozenset(
    (
        "leader.replication.throttled.rate",
        "follower.replication.throttled.rate",
        "replica.alter.log.dirs.io.max.bytes.per.second",
    )
)
DYNAMIC = (
    DYNAMIC_LOG | DYNAMIC_CLEANER | DYNAMIC_REMOTE | DYNAMIC_THREADS | DYNAMIC_SASL | _THROTTLES
)


class Kind(enum.Enum):
    """What has properties, by the name of its section in the file."""

    BROKER = "brokers"
    GROUP = "groups"
    METRICS = "client-metrics"


TABLES: Mapping[Kind, Options] = {
    Kind.BROKER: BROKER,
    Kind.GROUP: GROUP,
    Kind.METRICS: CLIENT_METRICS,
}
Properties = Mapping[str, str]


class ChangedProperties:
    """See the module.  A broker has one; that of a cluster, which has no file (None), is a
    `MemberProperties`."""

    def __init__(self, directory: Path | None) -> None:
        self._file = None if directory is None else directory / PROPERTIES_FILE
        self._found: Mapping[Kind, Mapping[str, Properties]] = {kind: {} for kind in Kind}

    def load(self) -> None:
        """Read the file.  LogError, CorruptLogError."""
        if self._file is None:
            return
        try:
            document = json.loads(self._file.read_bytes())
            self._found = {
                kind: {
                    str(name): {str(k): str(v) for k, v in properties.items()}
                    for name, properties in document.get(kind.value, {}).items()
                }
                for kind in Kind
            }
        except (FileNotFoundError, NotADirectoryError):
            return  # of a directory that cannot be, whoever opens the log tells
        except OSError as e:
            raise LogError(
                f"cannot read {self._file}: {e.strerror}", hint="check its permissions"
            ) from e
        except (ValueError, AttributeError, RecursionError) as e:
            raise CorruptLogError(
                f"{self._file} is damaged: {e}",
                hint="restore it, or remove it: what it changed is then as it was before",
            ) from e

    def of(self, kind: Kind, name: str) -> Properties:
        """What was changed of one broker, group or subscription; ALL_BROKERS: of all brokers."""
        return self._found[kind].get(name, {})

    def names(self, kind: Kind) -> list[str]:
        """Whose properties were changed."""
        return sorted(self._found[kind])

    def replace(self, kind: Kind, name: str, properties: Properties) -> None:
        """Have these properties of `name` and no others, on disk.  LogError, and nothing has
        changed."""
        assert self._file is not None  # in a cluster the controller is asked
        section = {**self._found[kind], name: dict(properties)}
        if not properties:
            del section[name]
        found = {**self._found, kind: section}
        document = {"version": 1, **{k.value: found[k] for k in Kind}}
        try:
            replace_file(self._file, (json.dumps(document, indent=1) + "\n").encode())
        except OSError as e:
            raise LogError(
                f"cannot write {self._file}: {e.strerror}",
                hint="check space and permissions of the log directory",
            ) from e
        self._found = found


def checked(
    kind: Kind,
    properties: Properties,
    broker: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> dict[str, str]:
    """Properties by their own names.  ConfigError for one that is unknown, cannot change, or has a
    bad value; `broker`: the values of the broker's options, which limit those of groups; `name`: of
    the resource, where a property may be one of single brokers only."""
    out = {}
    for given, text in properties.items():
        row = TABLES[kind].find(given)
        if kind is Kind.BROKER and row.name not in DYNAMIC:
            raise ConfigError(
                f"the broker's property {row.name} cannot change while it runs",
                hint="set it in its properties file and restart it",
            )
        row.parse(text)
        if kind is Kind.BROKER and name == ALL_BROKERS and row.name in DYNAMIC_SASL:
            raise ConfigError(
                f"the broker's property {row.name} is one of single brokers",
                hint="set it for each of them by its node id, not for all at once",
            )
        out[row.name] = text
    if kind is Kind.GROUP and broker is not None:
        _check_group(out, broker)
    return out


def value_of_group(name: str, own: Properties, broker: Mapping[str, Any]) -> int:
    """What holds for a group in ms: its own property, else the broker's; that too where it cannot
    be read: it may come from the store, where anybody may have written it."""
    row = GROUP.find(name)
    text = own.get(name)
    if text is not None:
        try:
            return int(row.parse(text))
        except ConfigError as e:
            log.debug("a property of a group in the store has no effect: %s", e)
    return int(broker[row.synonym])


def _check_group(own: Properties, broker: Mapping[str, Any]) -> None:
    """Kafka's `GroupConfig.validate`: the limits of the broker, and a session that is longer than
    the time between two heartbeats."""
    values = {row.name: value_of_group(row.name, own, broker) for row in GROUP.rows}
    for name, value in values.items():
        least, most = (f"group.{name.replace('.', f'.{m}.', 1)}" for m in ("min", "max"))
        if name in own and not broker[least] <= value <= broker[most]:
            raise ConfigError(
                f"{name}: {value} is not from {broker[least]} to {broker[most]}",
                hint=f"choose another value, or change {least} or {most} of the broker",
            )
    heartbeat, session = (values[row.name] for row in GROUP.rows)
    if session <= heartbeat:
        raise ConfigError(
            "consumer.session.timeout.ms must be greater than consumer.heartbeat.interval.ms",
            hint=f"choose more than {heartbeat}",
        )
