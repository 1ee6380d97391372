"""Requests about configs: DescribeConfigs, AlterConfigs, IncrementalAlterConfigs,
ListConfigResources.

Topics, brokers, groups, subscriptions to clients' metrics and loggers have properties that can be
changed; those of a broker that concern its logs apply at once, and all but the loggers' levels
survive a restart.  What a broker has from its properties file is read-only while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kdirect.broker import loggers
from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.changed_properties import ALL_BROKERS, DYNAMIC, TABLES, Kind, checked
from kdirect.broker.config_requests import (
    BROKER_RESOURCE,
    GROUP_RESOURCE,
    KINDS,
    LOGGER_RESOURCE,
    METRICS_RESOURCE,
    TOPIC_RESOURCE,
    Refusal,
    changed,
    ill_formed,
)
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.services import Services
from kdirect.broker.topic_requests import name_error
from kdirect.broker.topics import Topic
from kdirect.errors import ConfigError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.log.config import LogConfig
from kdirect.option_table import Option, Options, config_text
from kdirect.options import BROKER, TOPIC

SOURCE_TOPIC = 1
SOURCE_DYNAMIC_BROKER = 2
SOURCE_DYNAMIC_DEFAULT_BROKER = 3
SOURCE_STATIC_BROKER = 4
SOURCE_DEFAULT = 5
SOURCE_LOGGER = 6
SOURCE_CLIENT_METRICS = 7
SOURCE_GROUP = 8

_INT, _LONG, _PASSWORD = 3, 5, 9
_TYPES = {
    "bool": 1,
    "str": 2,
    "enum": 2,
    "int": _INT,
    "long": _LONG,
    "ms": _LONG,
    "bytes": _LONG,
    "float": 6,
    "list": 7,
}


# Where Kafka's type is not what the row's kind comes to.
_STRING, _SHORT, _LIST = 2, 4, 7
_KAFKAS_TYPES = {
    "advertised.listeners": _STRING,
    "group.consumer.heartbeat.interval.ms": _INT,
    "group.consumer.max.heartbeat.interval.ms": _INT,
    "group.consumer.max.session.timeout.ms": _INT,
    "group.consumer.min.heartbeat.interval.ms": _INT,
    "group.consumer.min.session.timeout.ms": _INT,
    "group.consumer.session.timeout.ms": _INT,
    "group.initial.rebalance.delay.ms": _INT,
    "group.max.session.timeout.ms": _INT,
    "group.min.session.timeout.ms": _INT,
    "leader.imbalance.check.interval.seconds": _LONG,
    "listeners": _STRING,
    "log.cleanup.policy": _LIST,
    "log.dirs": _STRING,
    "log.flush.offset.checkpoint.interval.ms": _INT,
    "offsets.topic.replication.factor": _SHORT,
    "producer.id.expiration.ms": _INT,
    "remote.fetch.max.wait.ms": _INT,
    "sasl.login.refresh.buffer.seconds": _SHORT,
    "sasl.login.refresh.min.period.seconds": _SHORT,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": _INT,
    "transaction.remove.expired.transaction.cleanup.interval.ms": _INT,
    "transaction.state.log.replication.factor": _SHORT,
    "transactional.id.expiration.ms": _INT,
}


def _text(value: Any) -> str | None:
    return None if value is None else config_text(value)


def _type(row: Option) -> int:
    """Kafka's number for the type of a property: INT if its upper bound fits into 32 bits."""
    if row.secret:
        return _PASSWORD
    if row.name in _KAFKAS_TYPES:
        return _KAFKAS_TYPES[row.name]
    kind = _TYPES[row.kind]
    return _INT if kind == _LONG and row.high is not None and row.high <= 0x7FFFFFFF else kind


def result_row(resource: Any, code: int, message: str | None) -> dict[str, Any]:
    """The answer for one resource of a request that changes properties."""
    return {
        "error_code": code,
        "error_message": message,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
    }


def impossible(resource: Any, e: ConfigError) -> dict[str, Any]:
    """The answer where properties cannot be so.  As Kafka, which refuses a broker's property that
    is well formed and impossible with another code."""
    of_broker = resource.resource_type == BROKER_RESOURCE
    code = ErrorCode.INVALID_REQUEST if of_broker else ErrorCode.INVALID_CONFIG
    return result_row(resource, code, str(e))


def change_levels(resource: Any, request: Any) -> dict[str, Any]:
    """Change the levels of this process's loggers; the answer."""
    refusal = loggers.refusal(resource.configs)
    if request.API_KEY == p.AlterConfigsRequest.API_KEY:
        refusal = ErrorCode.INVALID_REQUEST, "levels are changed one by one"
    if refusal is None and not request.validate_only:
        loggers.change(resource.configs)
    return result_row(resource, *(refusal or (0, None)))


Rows = list[dict[str, Any]]
Change = Callable[
    [Mapping[str, str], Any], dict[str, str]
]  # what is set, resource -> what is to be
_SOURCES = {Kind.GROUP: SOURCE_GROUP, Kind.METRICS: SOURCE_CLIENT_METRICS}
KIND_OF = {
    BROKER_RESOURCE: Kind.BROKER,
    GROUP_RESOURCE: Kind.GROUP,
    METRICS_RESOURCE: Kind.METRICS,
}


def _row(row: Option, synonyms: Rows, *, read_only: bool = False, default: Any = None) -> Any:
    """The row of a property whose value is that of the first of `synonyms`."""
    first = synonyms[0] if synonyms else {"value": default, "source": SOURCE_DEFAULT}
    return {
        "name": row.name,
        "value": first["value"],
        "read_only": read_only,
        "config_source": first["source"],
        "is_sensitive": row.secret,
        "synonyms": synonyms,
        "config_type": _type(row),
        "documentation": row.help,
        "is_default": first["source"] == SOURCE_DEFAULT,
    }


class ConfigHandlers:
    """Handlers of requests about properties.  A broker has one, used on its event loop."""

    def __init__(self, services: Services) -> None:
        self._config = services.config
        self._topics = services.topics
        self._files = services.files
        self._logs = services.logs
        self._changed = services.properties
        self._broker_name = str(services.cluster.node_id)

    # -- looking -----------------------------------------------------------------------------------

    def broker_synonyms(self, name: str) -> Rows:
        """The values of a broker's property, the one in force first."""
        row = BROKER.find(name)
        out = []
        for source, whose in (
            (SOURCE_DYNAMIC_BROKER, self._broker_name),
            (SOURCE_DYNAMIC_DEFAULT_BROKER, ALL_BROKERS),
        ):
            value = self.dynamic(whose).get(name)
            if value is not None:
                out.append({"name": name, "value": value, "source": source})
        if name in self._config.given:
            value = None if row.secret else _text(self._config.fixed[name])
            out.append({"name": name, "value": value, "source": SOURCE_STATIC_BROKER})
        if row.default is not None:
            out.append({"name": name, "value": _text(row.default), "source": SOURCE_DEFAULT})
        return out

    def dynamic(self, whose: str) -> Mapping[str, str]:
        """What was changed of a broker while it ran; ALL_BROKERS: of all brokers."""
        return self._changed.of(Kind.BROKER, whose)

    def topic_rows(self, topic: Topic) -> Rows:
        """Every property of a topic as it is in force, in the form of DescribeConfigs."""
        out = []
        for name, value in self._topics.log_config(topic).topic_properties().items():
            row = TOPIC.find(name)
            own = name in topic.configs
            synonyms: Rows = [{"name": name, "value": value, "source": SOURCE_TOPIC}] if own else []
            if row.synonym:
                synonyms += self.broker_synonyms(row.synonym)
            shown = _row(row, synonyms, default=value)
            out.append({**shown, "value": value, "is_default": not own})
        return out

    def broker_rows(self) -> Rows:
        """Every property of the broker, in the form of DescribeConfigs."""
        below = [name for name in self._config if BROKER.find(name).secret]  # of a prefix
        names = [row.name for row in BROKER.rows if not row.is_prefix]
        return [
            _row(BROKER.find(n), self.broker_synonyms(n), read_only=n not in DYNAMIC)
            for n in [*names, *sorted(below)]
        ]

    def all_brokers_rows(self) -> Rows:
        """What was changed of all brokers."""
        out = []
        for name in sorted(self.dynamic(ALL_BROKERS)):
            found = [s for s in self.broker_synonyms(name) if s["source"] != SOURCE_DYNAMIC_BROKER]
            out.append(_row(BROKER.find(name), found))
        return out

    def _own_rows(self, kind: Kind, name: str) -> Rows:
        """The properties of a group or a subscription: those that were set, and defaults."""
        own, out = self._changed.of(kind, name), []
        for row in TABLES[kind].rows:
            synonyms: Rows = []
            if row.name in own:
                value = own[row.name]
                synonyms.append({"name": row.name, "value": value, "source": _SOURCES[kind]})
            default = _text(self._config[row.synonym] if row.synonym else row.default)
            if kind is Kind.GROUP and not synonyms:
                synonyms.append({"name": row.name, "value": default, "source": SOURCE_DEFAULT})
            out.append(_row(row, synonyms, default=default))
        return out

    def _logger_rows(self) -> Rows:
        row = Option("", "enum", None, "The level of a logger.")
        return [
            {
                **_row(row, [{"name": name, "value": level, "source": SOURCE_LOGGER}]),
                "name": name,
                "synonyms": [],
            }
            for name, level in loggers.levels().items()
        ]

    def describe(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        results = []
        for r in request.resources:
            refusal = self._not_there(r.resource_type, r.resource_name)
            rows = [] if refusal else self._rows_of(r.resource_type, r.resource_name)
            if r.configuration_keys:  # none names all, as null does
                wanted = set(r.configuration_keys)
                rows = [row for row in rows if row["name"] in wanted]
            for row in rows:
                if not request.include_synonyms:
                    row["synonyms"] = []
                if not request.include_documentation:
                    row["documentation"] = None
            code, message = refusal or (0, "")
            results.append(
                {
                    "error_code": code,
                    "error_message": message,
                    "resource_type": r.resource_type,
                    "resource_name": r.resource_name,
                    "configs": rows,
                }
            )
        return respond(header, p.DescribeConfigsResponse, results=results)

    def brokers(self) -> list[str]:
        """The names of the brokers that there are."""
        return [self._broker_name]

    def _not_there(self, kind: int, name: str) -> Refusal | None:
        """Why nothing can be said of a resource, or done with it: (code, text)."""
        if kind not in KINDS:
            return ErrorCode.INVALID_REQUEST, f"resources of type {kind} have no configs"
        if kind == TOPIC_RESOURCE:
            topic = self._topics.get(name)
            if topic is None or topic.deleting:
                unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                return name_error(name) or unknown, f"there is no topic {name}"
        elif kind in (BROKER_RESOURCE, LOGGER_RESOURCE):
            if name != self._broker_name and (name or kind == LOGGER_RESOURCE):
                return ErrorCode.INVALID_REQUEST, f"this is broker {self._broker_name}, not {name}"
        elif not name:
            return ErrorCode.INVALID_REQUEST, "the name of a group or subscription is empty"
        return None

    def _rows_of(self, kind: int, name: str) -> Rows:
        if kind == TOPIC_RESOURCE:
            topic = self._topics.get(name)
            return [] if topic is None else self.topic_rows(topic)
        if kind == BROKER_RESOURCE:
            return self.broker_rows() if name else self.all_brokers_rows()
        if kind == LOGGER_RESOURCE:
            return self._logger_rows()
        return self._own_rows(KIND_OF[kind], name)

    # -- changing ----------------------------------------------------------------------------------

    def alter(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        """AlterConfigs: the given properties replace all that were set."""
        return later(self._alter(header, request))

    async def _alter(self, header: p.RequestHeader, request: Any) -> Answer:
        def replaced(own: Mapping[str, str], r: Any) -> dict[str, str]:
            return {c.name: c.value for c in r.configs}

        # On the admin thread: configs are files.
        rows = await self._files.admin(
            lambda: [self._change(r, request, lambda _: replaced) for r in request.resources]
        )
        return respond(header, p.AlterConfigsResponse, responses=rows)

    def alter_incrementally(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """IncrementalAlterConfigs: apply the given operations to the properties that are set."""
        return later(self._alter_incrementally(header, request))

    async def _alter_incrementally(self, header: p.RequestHeader, request: Any) -> Answer:
        def change(table: Options) -> Change:
            return lambda own, r: changed(own, r, table)

        rows = await self._files.admin(
            lambda: [self._change(r, request, change) for r in request.resources]
        )
        return respond(header, p.IncrementalAlterConfigsResponse, responses=rows)

    def _change(self, r: Any, request: Any, change_of: Callable[[Options], Change]) -> Any:
        """Change one resource, on the admin thread; its row of the answer.  `change_of(table)` says
        what to make of the properties that are set."""
        refusal = ill_formed(r, request.resources)
        if refusal is None and r.resource_type == TOPIC_RESOURCE and not r.resource_name:
            refusal = ErrorCode.INVALID_REQUEST, "Default topic resources are not allowed."
        refusal = refusal or self._not_there(r.resource_type, r.resource_name)
        if refusal is not None:
            return result_row(r, *refusal)
        if r.resource_type == LOGGER_RESOURCE:
            return change_levels(r, request)
        try:
            if r.resource_type == TOPIC_RESOURCE:
                self._change_topic(r, change_of(TOPIC), request.validate_only)
            else:
                kind = KIND_OF[r.resource_type]
                self._change_other(kind, r, change_of(TABLES[kind]), request.validate_only)
        except ConfigError as e:
            return impossible(r, e)
        except KdirectError as e:
            return result_row(r, *explain(e, f"change of the properties of {r.resource_name}"))
        return result_row(r, 0, None)

    def _change_topic(self, r: Any, change: Change, validate_only: bool) -> None:
        topic = self._topics.get(r.resource_name)
        assert topic is not None  # `_not_there` has looked
        configs = change(topic.configs, r)
        if validate_only:
            self._topics.checked_configs(topic.name, configs)
        else:
            self._topics.configure(topic, configs)

    def _change_other(self, kind: Kind, r: Any, change: Change, validate_only: bool) -> None:
        name = r.resource_name
        wanted = checked(kind, change(self._changed.of(kind, name), r), self._config, name=name)
        values = None
        if kind is Kind.BROKER:
            found = {w: self.dynamic(w) for w in (ALL_BROKERS, self._broker_name)}
            values = self._config.changed_by(*{**found, name: wanted}.values())
            self._config.check_threads(values)
        if validate_only:
            return
        self._changed.replace(kind, name, wanted)
        if values is not None:
            self._config.change(values)
            self._logs.reconfigure(LogConfig.from_broker(values))

    # -- lists -------------------------------------------------------------------------------------

    def list_resources(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """ListConfigResources; version 0 lists subscriptions to metrics only."""
        kinds = list(request.resource_types) or list(KINDS) if header.api_version else []
        kinds = kinds or [METRICS_RESOURCE]
        if any(kind not in KINDS for kind in kinds):
            code = ErrorCode.UNSUPPORTED_VERSION
            return respond(
                header, p.ListConfigResourcesResponse, error_code=code, config_resources=[]
            )
        names: dict[int, list[str]] = {
            TOPIC_RESOURCE: [t.name for t in self._topics if not t.deleting],
            BROKER_RESOURCE: self.brokers(),
            LOGGER_RESOURCE: self.brokers(),
            METRICS_RESOURCE: self._changed.names(Kind.METRICS),
            GROUP_RESOURCE: self._changed.names(Kind.GROUP),
        }
        rows = [
            {"resource_name": name, "resource_type": kind}
            for kind in dict.fromkeys(kinds)
            for name in names[kind]
        ]
        return respond(header, p.ListConfigResourcesResponse, error_code=0, config_resources=rows)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("DescribeConfigs", self.describe, True),
            ("AlterConfigs", self.alter, True),
            ("IncrementalAlterConfigs", self.alter_incrementally, True),
            ("ListConfigResources", self.list_resources, True),
        )
