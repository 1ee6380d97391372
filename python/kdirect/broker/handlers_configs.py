"""Requests about configs: DescribeConfigs, AlterConfigs, IncrementalAlterConfigs,
ListConfigResources.

A topic has properties of its own that can be changed.  The broker's are set when it starts, and are
read-only while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.config_requests import (
    BROKER_RESOURCE,
    DELETE,
    TOPIC_RESOURCE,
    changed,
    ill_formed,
)
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.services import Services
from kdirect.broker.topics import Topic
from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.option_table import Option, config_text
from kdirect.options import BROKER, TOPIC

SOURCE_TOPIC = 1
SOURCE_STATIC_BROKER = 4
SOURCE_DEFAULT = 5

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


def _text(value: Any) -> str | None:
    return None if value is None else config_text(value)


def _type(row: Option) -> int:
    """Kafka's number for the type of a property: INT if its upper bound fits into 32 bits."""
    if row.secret:
        return _PASSWORD
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


class ConfigHandlers:
    """Handlers of requests about properties.  A broker has one, used on its event loop."""

    def __init__(self, services: Services) -> None:
        self._config = services.config
        self._topics = services.topics
        self._files = services.files
        self._broker_name = str(services.cluster.node_id)

    def topic_rows(self, topic: Topic) -> list[dict[str, Any]]:
        """Every property of a topic as it is in force, in the form of DescribeConfigs."""
        out = []
        for name, value in self._topics.log_config(topic).topic_properties().items():
            row = TOPIC.find(name)
            own = name in topic.configs
            given = row.synonym in self._config.given
            source = SOURCE_TOPIC if own else SOURCE_STATIC_BROKER if given else SOURCE_DEFAULT
            synonyms = [{"name": name, "value": value, "source": SOURCE_TOPIC}] if own else []
            if row.synonym:
                default = _text(self._config[row.synonym])
                synonyms.append(
                    {
                        "name": row.synonym,
                        "value": default,
                        "source": SOURCE_STATIC_BROKER if given else SOURCE_DEFAULT,
                    }
                )
            out.append(
                {
                    "name": name,
                    "value": value,
                    "read_only": False,
                    "config_source": source,
                    "is_sensitive": False,
                    "synonyms": synonyms,
                    "config_type": _type(row),
                    "documentation": row.help,
                    "is_default": not own,
                }
            )
        return out

    def broker_rows(self) -> list[dict[str, Any]]:
        """Every property of the broker, in the form of DescribeConfigs."""
        out = []
        below = [name for name in self._config if BROKER.find(name).secret]  # of a prefix
        rows = [row for row in BROKER.rows if not row.is_prefix]
        for row in [*rows, *(BROKER.find(name) for name in sorted(below))]:
            source = SOURCE_STATIC_BROKER if row.name in self._config.given else SOURCE_DEFAULT
            value = None if row.secret else _text(self._config[row.name])
            out.append(
                {
                    "name": row.name,
                    "value": value,
                    "read_only": True,
                    "config_source": source,
                    "is_sensitive": row.secret,
                    "synonyms": [{"name": row.name, "value": value, "source": source}],
                    "config_type": _type(row),
                    "documentation": row.help,
                    "is_default": source == SOURCE_DEFAULT,
                }
            )
        return out

    def describe(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        results = []
        for r in request.resources:
            code, message, rows = self._describe(r.resource_type, r.resource_name)
            if r.configuration_keys is not None:
                wanted = set(r.configuration_keys)
                rows = [row for row in rows if row["name"] in wanted]
            for row in rows:
                if not request.include_synonyms:
                    row["synonyms"] = []
                if not request.include_documentation:
                    row["documentation"] = None
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

    def _describe(self, kind: int, name: str) -> tuple[int, str | None, list[dict[str, Any]]]:
        if kind == TOPIC_RESOURCE:
            topic = self._topics.get(name)
            if topic is None or topic.deleting:
                return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}", []
            return 0, None, self.topic_rows(topic)
        if kind == BROKER_RESOURCE:
            if name not in ("", self._broker_name):
                return ErrorCode.INVALID_REQUEST, f"there is no broker {name}", []
            return 0, None, self.broker_rows()
        return ErrorCode.INVALID_REQUEST, f"resources of type {kind} have no configs here", []

    # -- changing ----------------------------------------------------------------------------------

    def alter(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        """AlterConfigs: the given properties replace all properties that the topic had set."""
        return later(self._alter(header, request))

    async def _alter(self, header: p.RequestHeader, request: Any) -> Answer:

        def new_configs(topic: Topic, r: Any) -> dict[str, str]:
            return {c.name: c.value for c in r.configs}

        # On the admin thread: configs are files.
        rows = await self._files.admin(
            lambda: [self._change(r, request, new_configs) for r in request.resources]
        )
        return respond(header, p.AlterConfigsResponse, responses=rows)

    def alter_incrementally(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """IncrementalAlterConfigs: apply the given operations to the properties that are set."""
        return later(self._alter_incrementally(header, request))

    async def _alter_incrementally(self, header: p.RequestHeader, request: Any) -> Answer:
        def change(r: Any) -> dict[str, Any]:
            return (
                result_row(r, 0, None)
                if self._takes_back_nothing(r)
                else self._change(r, request, lambda t, r: changed(t.configs, r, TOPIC))
            )

        # On the admin thread: configs are files.
        rows = await self._files.admin(lambda: [change(r) for r in request.resources])
        return respond(header, p.IncrementalAlterConfigsResponse, responses=rows)

    def _takes_back_nothing(self, r: Any) -> bool:
        """Whether the request only deletes dynamic properties of the broker.  It never has any, so
        this succeeds; Kafka's tools send such requests."""
        if r.resource_type != BROKER_RESOURCE or r.resource_name not in (
            "",
            self._broker_name,
        ):
            return False
        return all(c.config_operation == DELETE for c in r.configs)

    def _change(self, r: Any, request: Any, new_configs: Any) -> dict[str, Any]:
        def result(code: int, message: str | None) -> dict[str, Any]:
            return result_row(r, code, message)

        refusal = ill_formed(r, request.resources)
        if refusal is not None:
            return result(*refusal)
        if r.resource_type == BROKER_RESOURCE:
            return result(
                ErrorCode.INVALID_REQUEST,
                "the broker's properties cannot change while it runs;"
                " set them in its properties file and restart it",
            )
        if r.resource_type != TOPIC_RESOURCE:
            return result(
                ErrorCode.INVALID_REQUEST,
                f"resources of type {r.resource_type} have no configs here",
            )
        topics = self._topics
        topic = topics.get(r.resource_name)
        if topic is None or topic.deleting:
            return result(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {r.resource_name}"
            )
        try:
            configs = new_configs(topic, r)
            if request.validate_only:
                topics.checked_configs(topic.name, configs)
            else:
                topics.configure(topic, configs)
        except KdirectError as e:
            return result(*explain(e, f"change of topic {topic.name}"))
        return result(0, None)

    def list_resources(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        kinds = (
            request.resource_types if header.api_version >= 1 else [16]
        )  # version 0 lists client metrics only
        rows: list[dict[str, Any]] = []
        if not kinds and header.api_version >= 1:
            kinds = [TOPIC_RESOURCE, BROKER_RESOURCE]
        if TOPIC_RESOURCE in kinds:
            rows += [
                {"resource_name": t.name, "resource_type": TOPIC_RESOURCE}
                for t in self._topics
                if not t.deleting
            ]
        if BROKER_RESOURCE in kinds:
            rows.append(
                {
                    "resource_name": self._broker_name,
                    "resource_type": BROKER_RESOURCE,
                }
            )
        return respond(header, p.ListConfigResourcesResponse, error_code=0, config_resources=rows)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("DescribeConfigs", self.describe, True),
            ("AlterConfigs", self.alter, True),
            ("IncrementalAlterConfigs", self.alter_incrementally, True),
            ("ListConfigResources", self.list_resources, True),
        )
