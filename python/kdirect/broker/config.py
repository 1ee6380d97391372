"""The broker's configuration: properties files, listeners, topic configs.

Owns: turning text (files, flags, keyword arguments) into checked values, by the BROKER table of
options. No I/O but the reading of a named properties file.  Every mistake is a ConfigError that
names the property.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdirect.broker.request_memory import default_limit
from kdirect.errors import ConfigError
from kdirect.log.config import LogConfig
from kdirect.log.remote_rules import check_broker
from kdirect.options import BROKER
from kdirect.thread_options import DYNAMIC_THREADS, IDLE_THREADS

# Properties that stock server.properties files carry, or that tune how Kafka does its work.  They
# mean nothing to a broker of this kind and are accepted with a warning, so that such a file works
# unchanged.  replica.selector.class is one of them because a consumer with client.rack reads from a
# replica of its rack here in any case.
_IGNORED = """
    process.roles controller.quorum.voters controller.quorum.bootstrap.servers
    controller.listener.names listener.security.protocol.map inter.broker.listener.name
    security.inter.broker.protocol socket.send.buffer.bytes socket.receive.buffer.bytes
    zookeeper.set.acl
    share.coordinator.state.topic.replication.factor share.coordinator.state.topic.min.isr
    metadata.log.dir authorizer.class.name
    super.users allow.everyone.if.no.acl.found inter.broker.protocol.version
    log.message.format.version replica.fetch.max.bytes
    initial.broker.registration.timeout.ms broker.heartbeat.interval.ms broker.session.timeout.ms
    metrics.num.samples
    remote.log.storage.manager.class.name remote.log.storage.manager.class.path
    remote.log.storage.manager.impl.prefix remote.log.metadata.manager.class.name
    remote.log.metadata.manager.class.path remote.log.metadata.manager.impl.prefix
    remote.log.metadata.manager.listener.name remote.log.metadata.custom.metadata.max.bytes
    remote.log.manager.thread.pool.size remote.log.manager.follower.thread.pool.size
    remote.log.manager.task.retry.backoff.ms remote.log.manager.task.retry.backoff.max.ms
    remote.log.manager.task.retry.jitter remote.log.index.file.cache.ttl.ms
    remote.log.manager.copy.quota.window.num remote.log.manager.copy.quota.window.size.seconds
    remote.log.manager.fetch.quota.window.num remote.log.manager.fetch.quota.window.size.seconds
    rlmm.config.remote.log.metadata.topic.retention.ms
    rlmm.config.remote.log.metadata.consume.wait.ms
    rlmm.config.remote.log.metadata.initialization.retry.max.timeout.ms
    rlmm.config.remote.log.metadata.initialization.retry.interval.ms
    replica.selector.class replica.fetch.backoff.ms replica.fetch.min.bytes
    replica.fetch.response.max.bytes replica.fetch.wait.max.ms
    replica.high.watermark.checkpoint.interval.ms replica.socket.receive.buffer.bytes
    replica.socket.timeout.ms controller.socket.timeout.ms controller.quorum.append.linger.ms
    controller.quorum.election.backoff.max.ms controller.quorum.election.timeout.ms
    controller.quorum.fetch.timeout.ms controller.quorum.request.timeout.ms
    controller.quorum.retry.backoff.ms controller.performance.always.log.threshold.ms
    controller.performance.sample.period.ms delete.records.purgatory.purge.interval.requests
    fetch.purgatory.purge.interval.requests producer.purgatory.purge.interval.requests
    group.coordinator.append.linger.ms group.coordinator.threads offsets.load.buffer.size
    transaction.state.log.load.buffer.size add.partitions.to.txn.retry.backoff.ms
    add.partitions.to.txn.retry.backoff.max.ms log.initial.task.delay.ms
    log.flush.start.offset.checkpoint.interval.ms producer.id.expiration.check.interval.ms
    metadata.log.max.record.bytes.between.snapshots
    metadata.log.max.snapshot.interval.ms metadata.log.segment.bytes metadata.log.segment.ms
    metadata.max.idle.interval.ms metadata.max.retention.bytes metadata.max.retention.ms
    metrics.recording.level metrics.sample.window.ms request.timeout.ms server.max.startup.time.ms
    socket.connection.setup.timeout.ms socket.connection.setup.timeout.max.ms
    unclean.leader.election.interval.ms
"""
IGNORED = frozenset(_IGNORED.split())


@dataclass(frozen=True, slots=True)
class Listener:
    """Where to listen.  `host` "" means every address; port 0: any free one."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name}://{format_address(self.host, self.port)}"


def format_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_LISTENER = re.compile(
    r"(?:([A-Za-z][A-Za-z0-9_]*)://)?(\[[0-9A-Fa-f:.%\w]*\]|[^\[\]:/\s]*):(\d{1,5})\Z"
)


def parse_listeners(items: str | Iterable[str], option: str = "listeners") -> tuple[Listener, ...]:
    """``PLAINTEXT://host:port`` or bare ``host:port``, separated by commas."""
    texts = (
        [t.strip() for t in items.split(",")]
        if isinstance(items, str)
        else [str(t).strip() for t in items]
    )
    out = []
    for text in texts:
        if not text:
            continue
        m = _LISTENER.match(text)
        if m is None or int(m[3]) > 65535:
            raise ConfigError(
                f"option {option}: {text!r} is not host:port",
                hint="write for example 127.0.0.1:9092 or PLAINTEXT://0.0.0.0:9092",
            )
        name = (m[1] or "PLAINTEXT").upper()
        if name in ("SSL", "SASL_SSL", "SASL_PLAINTEXT"):
            raise ConfigError(
                f"option {option}: {name} listeners are not supported",
                hint="use PLAINTEXT, on an address that only trusted hosts reach",
            )
        if name == "CONTROLLER":
            continue  # of Kafka's own quorum; there is none here
        out.append(Listener(name, m[2].strip("[]"), int(m[3])))
    if not out:
        raise ConfigError(
            f"option {option} names no listener", hint="write for example 127.0.0.1:9092"
        )
    return tuple(out)


def read_properties(path: str | Path) -> dict[str, str]:
    """A Java properties file: ``key=value``, ``key: value`` or ``key value``; # and ! comments; \\
    continues a line and escapes."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(
            f"cannot read the properties file {path}: {e.strerror}", hint="check --config"
        ) from e
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"the properties file {path} is not UTF-8 text", hint="check --config"
        ) from e
    return parse_properties(text)


def parse_properties(text: str) -> dict[str, str]:
    """See `read_properties`.  A key given twice keeps its last value, as in Java."""
    out: dict[str, str] = {}
    logical = ""
    for raw in text.splitlines():
        line = raw.lstrip(" \t\f")
        if not logical and (not line or line[0] in "#!"):
            continue
        trailing = len(line) - len(line.rstrip("\\"))
        if trailing % 2:
            logical += line[:-1]
            continue
        key, value = _split_property(logical + line)
        out[key] = value
        logical = ""
    if logical:
        key, value = _split_property(logical)
        out[key] = value
    return out


def _split_property(line: str) -> tuple[str, str]:
    i = 0
    while i < len(line) and line[i] not in "=: \t\f":
        i += 2 if line[i] == "\\" else 1
    key, rest = line[:i], line[i:].lstrip(" \t\f")
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(" \t\f")
    return _unescape(key), _unescape(rest).rstrip()


def _unescape(text: str) -> str:
    def one(m: re.Match[str]) -> str:
        return (
            chr(int(m[1], 16))
            if m[1]
            else {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}.get(m[2], m[2])
        )

    return re.sub(r"\\(?:u([0-9A-Fa-f]{4})|(.))", one, text)


class BrokerConfig(Mapping[str, Any]):
    """Checked values of all rows of the BROKER table, by row name.

    `given` are the names that were set; `ignored` are names of Kafka's that mean nothing here, or
    whose values are shown and have no effect.
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        known: dict[str, Any] = {}
        ignored = []
        for name, value in properties.items():
            without_effect = name in IGNORED or name in IDLE_THREADS
            if without_effect or name.startswith(("ssl.", "sasl.", "listener.name.", "metric.")):
                ignored.append(name)
            if name not in ignored or BROKER.knows(name):
                row = BROKER.find(name)
                if row.name in known and name != row.name:
                    continue  # the proper name goes before its aliases
                known[row.name] = value
        self.given = frozenset(known)
        self.ignored = tuple(sorted(ignored))
        self._values = BROKER.resolve(known)
        self.request_memory = self._request_memory()
        self._check_cluster()
        self._check_remote()
        self.listeners = parse_listeners(self._values["listeners"])
        advertised = self._values["advertised.listeners"]
        self.advertised = parse_listeners(advertised, "advertised.listeners") if advertised else ()
        for listener in self.advertised:
            if listener.host in ("", "0.0.0.0", "::"):
                raise ConfigError(
                    f"option advertised.listeners: {listener} is no address"
                    " that a client could use",
                    hint="name this host",
                )
        # As the properties file, or whoever started the broker, has them.
        self.fixed: Mapping[str, Any] = dict(self._values)
        # Called after `change`, on its thread; none may wait.
        self.on_change: list[Callable[[], None]] = []

    def _check_cluster(self) -> None:
        """Refuse what does not go together in a cluster, or without one."""
        if self._values["zookeeper.connect"]:
            if "process.roles" in self.ignored:
                raise ConfigError(
                    "options zookeeper.connect and process.roles are both given",
                    hint="take out process.roles: brokers of a cluster meet in ZooKeeper, or take"
                    " out zookeeper.connect for a broker that is alone",
                )
        else:
            BROKER.check_alone(self._values)
            self._values["offsets.topic.replication.factor"] = 1
            self._values["rlmm.config.remote.log.metadata.topic.replication.factor"] = 1

    def _check_remote(self) -> None:
        """Refuse what does not go together in tiered storage."""
        if not self._values["remote.log.storage.system.enable"]:
            return
        if not self._values["remote.log.storage.uri"]:
            raise ConfigError(
                "option remote.log.storage.system.enable is true, and remote.log.storage.uri is"
                " missing",
                hint="give the object store, for example s3://bucket/logs or file:///var/lib/tiers",
            )
        check_broker(LogConfig.from_broker(self._values))

    def _request_memory(self) -> int:
        """The bound of `queued.max.request.bytes`; -1: none."""
        given, largest = (
            self._values["queued.max.request.bytes"],
            self._values["socket.request.max.bytes"],
        )
        if given is None:
            return default_limit(largest)
        if 0 <= given < largest:
            raise ConfigError(
                f"option queued.max.request.bytes: {given} is below socket.request.max.bytes"
                f" ({largest})",
                hint="raise it, lower socket.request.max.bytes, or give -1 for no bound",
            )
        return int(given)

    def changed_by(self, *dynamic: Mapping[str, str]) -> dict[str, Any]:
        """The values after properties that were changed while the broker runs, those of all brokers
        before its own.  ConfigError for one that it cannot have."""
        values = dict(self.fixed)
        for properties in dynamic:
            values.update({n: BROKER.find(n).parse(text) for n, text in properties.items()})
        if not values["zookeeper.connect"]:
            BROKER.check_alone(values)
        LogConfig.from_broker(values)
        return values

    def check_threads(self, values: Mapping[str, Any]) -> None:
        """Refuse numbers of threads that change too much at once: Kafka's rule for a broker that
        runs.  `values` are those of `changed_by`."""
        for name in sorted(DYNAMIC_THREADS):
            now, wanted = self._values[name], values[name]
            if wanted == now or max(1, now // 2) <= wanted <= 2 * now:
                continue
            raise ConfigError(
                f"the broker's property {name} cannot change from {now} to {wanted} while it runs",
                hint=f"choose {max(1, now // 2)} to {2 * now}, and go on from there; or set it in"
                " the properties file, and restart the broker",
            )

    def change(self, values: dict[str, Any]) -> None:
        """Have what `changed_by` has returned from now on."""
        self._values = values
        for told in self.on_change:
            told()

    @classmethod
    def from_arguments(
        cls, properties: Mapping[str, Any] | None = None, /, **keywords: Any
    ) -> BrokerConfig:
        """From a mapping of property names and from keyword arguments (underscores for dots), which
        go first."""
        merged = dict(properties or {})
        for name, value in keywords.items():
            if value is not None:
                merged[name.replace("_", ".")] = value
        return cls(merged)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
