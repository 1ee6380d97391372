"""Requests about properties in a cluster: `ConfigHandlers` of a member.

Topics' properties and a few of the brokers' are kept in the metadata store, where the controller
writes them; any broker takes the requests.  All other properties of a broker are set when it
starts, as those of a broker that is alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Set
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.config_requests import (
    APPEND,
    BROKER_RESOURCE,
    DELETE,
    SET,
    SUBTRACT,
    TOPIC_RESOURCE,
    changed,
    ill_formed,
    operation_of,
)
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.handlers_configs import ConfigHandlers, result_row
from kdirect.broker.handlers_topics import ask
from kdirect.broker.member_topics import ASK_S
from kdirect.broker.picture import Picture
from kdirect.broker.services import Services
from kdirect.broker.topics import Topic
from kdirect.cluster import paths
from kdirect.cluster.codes import DONE, Code, Outcome
from kdirect.cluster.requests import AlterConfig, ConfigOf
from kdirect.errors import ConfigError
from kdirect.format import protocol as p
from kdirect.member.metadata import Metadata
from kdirect.options import BROKER, TOPIC

# Of brokers, these alone are kept in the store: for one broker or for all, and for all only.
DYNAMIC = frozenset(("leader.replication.throttled.rate", "follower.replication.throttled.rate"))
DYNAMIC_FOR_ALL = DYNAMIC | {"min.insync.replicas", "unclean.leader.election.enable"}

Properties = Mapping[str, str | None]


class MemberConfigHandlers(ConfigHandlers):
    """See the module.  A member has one, used on its event loop."""

    def __init__(self, services: Services, picture: Picture) -> None:
        super().__init__(services)
        self._picture = picture

    # -- looking -----------------------------------------------------------------------------------

    def describe(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        """DescribeConfigs.  A topic that is not known here is looked for at the controller."""
        names = {r.resource_name for r in request.resources if r.resource_type == TOPIC_RESOURCE}
        if all(self._picture.metadata.topic(name) is not None for name in names):
            return super().describe(connection, header, request)
        return later(self._describe_later(names, connection, header, request))

    async def _describe_later(
        self, names: Set[str], connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        await self._picture.catch_up(lambda m: all(m.topic(name) is not None for name in names))
        return super().describe(connection, header, request)

    def dynamic(self, whose: str) -> Mapping[str, str]:
        """Those of the store."""
        configs = self._picture.metadata.image.broker_configs
        return configs.get(whose or paths.ALL_BROKERS, {})

    def broker_rows(self) -> list[dict[str, Any]]:
        """Every property of the broker; few of them can be changed in a cluster."""
        rows = super().broker_rows()
        for row in rows:
            row["read_only"] = row["name"] not in DYNAMIC_FOR_ALL
        return rows

    # -- changing ----------------------------------------------------------------------------------

    def alter(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        """AlterConfigs: the given properties replace all that were set."""
        return later(self._all(header, p.AlterConfigsResponse, request, self._replaced))

    def alter_incrementally(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """IncrementalAlterConfigs: apply the given operations to the properties that are set."""
        return later(
            self._all(header, p.IncrementalAlterConfigsResponse, request, self._incremented)
        )

    async def _all(
        self,
        header: p.RequestHeader,
        response: Any,
        request: Any,
        question: Callable[[Any], AlterConfig],
    ) -> Answer:
        rows: list[Awaitable[dict[str, Any]]] = [
            self._alter_one(r, request, question) for r in request.resources
        ]
        return respond(header, response, responses=await asyncio.gather(*rows))

    async def _alter_one(
        self, r: Any, request: Any, question: Callable[[Any], AlterConfig]
    ) -> dict[str, Any]:
        validate_only = request.validate_only
        try:
            malformed = ill_formed(r, request.resources)
            if malformed is not None:
                return result_row(r, *malformed)
            refused = await self._refused(r)
            if refused is not None:
                return result_row(r, int(refused.code), refused.message)
            wanted = question(r)
        except Exception as e:
            return result_row(r, *explain(e, f"change of the properties of {r.resource_name}"))
        outcome = DONE
        if not validate_only and (wanted.properties or wanted.whole):
            outcome, _ = await ask(self._picture, wanted, ASK_S)
        if outcome.code == Code.NONE and not validate_only:
            await self._picture.until(lambda m: _shows(m, wanted))
        return result_row(r, int(outcome.code), outcome.message or None)

    async def _refused(self, r: Any) -> Outcome | None:
        if r.resource_type == TOPIC_RESOURCE:
            name, lists = r.resource_name, any(_changes_list(c) for c in r.configs)
            await self._picture.catch_up(lambda m: m.topic(name) is not None and not lists)
            topic = self._topics.get(name)
            if topic is None or topic.deleting:
                text = f"there is no topic {r.resource_name}"
                return Outcome(Code.UNKNOWN_TOPIC_OR_PARTITION, text)
        elif r.resource_type != BROKER_RESOURCE:
            text = f"resources of type {r.resource_type} have no configs here"
            return Outcome(Code.INVALID_REQUEST, text)
        return None

    def _replaced(self, r: Any) -> AlterConfig:
        given: Properties = {c.name: c.value for c in r.configs}
        if r.resource_type == BROKER_RESOURCE:
            return _of_broker(r.resource_name, given, whole=True)
        texts = self._topics.checked_configs(r.resource_name, given)
        return AlterConfig(None, ConfigOf.TOPIC, r.resource_name, texts, whole=True)

    def _incremented(self, r: Any) -> AlterConfig:
        if r.resource_type == BROKER_RESOURCE:
            for c in r.configs:
                if c.config_operation not in (SET, DELETE):
                    raise ConfigError(f"config {c.name} is no list", hint="set it or delete it")
            given = {c.name: c.value if c.config_operation == SET else None for c in r.configs}
            return _of_broker(r.resource_name, given, whole=False)
        topic = self._topics.get(r.resource_name)
        assert topic is not None  # `_refused` has looked
        configs = self._topics.checked_configs(topic.name, changed(topic.configs, r, TOPIC))
        named = _names(topic, r)
        properties = {name: configs.get(name) for name in named}
        return AlterConfig(None, ConfigOf.TOPIC, topic.name, properties)


def _changes_list(config: Any) -> bool:
    """Does the new value of a property depend on the one that it has?"""
    return operation_of(config) in (APPEND, SUBTRACT)


def _names(topic: Topic, r: Any) -> list[str]:
    """The properties that a request names, by their own names."""
    return [TOPIC.find(c.name).name for c in r.configs]


def _of_broker(name: str, properties: Properties, *, whole: bool) -> AlterConfig:
    """The question to change properties of a broker, of all where `name` is empty; ConfigError for
    what no broker has in the store."""
    for key, value in properties.items():
        if value is None:
            continue  # taking back what was never set changes nothing
        if key not in (DYNAMIC if name else DYNAMIC_FOR_ALL):
            raise ConfigError(
                f"the broker's property {key} cannot change while it runs",
                hint="set it in its properties file and restart it",
            )
        BROKER.find(key).parse(value)
    known = {key: value for key, value in properties.items() if key in DYNAMIC_FOR_ALL}
    return AlterConfig(None, ConfigOf.BROKER, name or paths.ALL_BROKERS, known, whole=whole)


def _shows(metadata: Metadata, wanted: AlterConfig) -> bool:
    """Does the picture have the properties as they were asked for?"""
    config: Mapping[str, str]
    if wanted.of is ConfigOf.BROKER:
        config = metadata.image.broker_configs.get(wanted.name, {})
    else:
        topic = metadata.topic(wanted.name)
        if topic is None:
            return True
        config = topic.config
    if wanted.whole:
        return dict(config) == {k: v for k, v in wanted.properties.items() if v is not None}
    return all(config.get(name) == value for name, value in wanted.properties.items())
