"""Requests about properties in a cluster: `ConfigHandlers` of a member.

The properties of topics, brokers, groups and subscriptions to clients' metrics are kept in the
metadata store, where the controller writes them; any broker takes the requests and checks them.
The levels of loggers are those of the process that is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Set
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.changed_properties import ALL_BROKERS, TABLES, Kind, checked
from kdirect.broker.config_requests import (
    APPEND,
    BROKER_RESOURCE,
    LOGGER_RESOURCE,
    SUBTRACT,
    TOPIC_RESOURCE,
    Refusal,
    changed,
    ill_formed,
    operation_of,
)
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.handlers_configs import (
    KIND_OF,
    ConfigHandlers,
    change_levels,
    impossible,
    result_row,
)
from kdirect.broker.handlers_topics import ask
from kdirect.broker.member_properties import CONFIG_OF, MemberProperties
from kdirect.broker.member_topics import ASK_S
from kdirect.broker.picture import Picture
from kdirect.broker.services import Services
from kdirect.cluster import paths
from kdirect.cluster.codes import DONE, Code
from kdirect.cluster.requests import AlterConfig, ConfigOf
from kdirect.errors import ConfigError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.member.metadata import Metadata
from kdirect.option_table import Options
from kdirect.options import TOPIC

# What the controller decides by, which is no single broker's.
FOR_ALL_ONLY = frozenset(("min.insync.replicas", "unclean.leader.election.enable"))

Properties = Mapping[str, str | None]


class MemberConfigHandlers(ConfigHandlers):
    """See the module.  A member has one, used on its event loop."""

    def __init__(self, services: Services, picture: Picture, properties: MemberProperties) -> None:
        super().__init__(services)
        self._picture = picture
        self._properties = properties

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

    def brokers(self) -> list[str]:
        return [str(node) for node in sorted(self._picture.metadata.brokers)]

    # -- changing ----------------------------------------------------------------------------------

    def alter(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        """AlterConfigs: the given properties replace all that were set."""
        return later(self._all(header, p.AlterConfigsResponse, request))

    def alter_incrementally(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """IncrementalAlterConfigs: apply the given operations to the properties that are set."""
        return later(self._all(header, p.IncrementalAlterConfigsResponse, request))

    async def _all(self, header: p.RequestHeader, response: Any, request: Any) -> Answer:
        rows: list[Awaitable[dict[str, Any]]] = [
            self._alter_one(r, request) for r in request.resources
        ]
        return respond(header, response, responses=await asyncio.gather(*rows))

    async def _alter_one(self, r: Any, request: Any) -> dict[str, Any]:
        whole = request.API_KEY == p.AlterConfigsRequest.API_KEY
        try:
            refusal = ill_formed(r, request.resources) or await self._refusal(r)
            if refusal is not None:
                return result_row(r, *refusal)
            if r.resource_type == LOGGER_RESOURCE:
                return change_levels(r, request)
            of_topic = r.resource_type == TOPIC_RESOURCE
            wanted = (self._of_topic if of_topic else self._of_other)(r, whole)
        except ConfigError as e:
            return impossible(r, e)
        except Exception as e:
            return result_row(r, *explain(e, f"change of the properties of {r.resource_name}"))
        outcome = DONE
        if not request.validate_only and (wanted.properties or whole):
            outcome, _ = await ask(self._picture, wanted, ASK_S)
        if outcome.code == Code.NONE and not request.validate_only:
            await self._picture.until(lambda m: _shows(m, wanted))
            await self._properties.settled()
        return result_row(r, int(outcome.code), outcome.message or None)

    async def _refusal(self, r: Any) -> Refusal | None:
        """Why nothing is done with a resource: (code, text).  What a list is added to has to be
        what the controller knows."""
        name, lists = r.resource_name, any(_changes_list(c) for c in r.configs)
        if r.resource_type == TOPIC_RESOURCE:
            await self._picture.catch_up(lambda m: m.topic(name) is not None and not lists)
            topic = self._topics.get(name)
            if topic is None or topic.deleting:
                return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}"
            return None
        await self._picture.catch_up(lambda m: not lists)
        if r.resource_type == BROKER_RESOURCE:
            return None  # of any broker: the controller keeps them
        return self._not_there(r.resource_type, name)

    def _of_topic(self, r: Any, whole: bool) -> AlterConfig:
        topic = self._topics.get(r.resource_name)
        assert topic is not None  # `_refusal` has looked
        configs = self._topics.checked_configs(topic.name, _after(topic.configs, r, TOPIC, whole))
        asked = configs if whole else _named(configs, r, TOPIC)
        return AlterConfig(None, ConfigOf.TOPIC, topic.name, asked, whole=whole)

    def _of_other(self, r: Any, whole: bool) -> AlterConfig:
        kind, name = KIND_OF[r.resource_type], r.resource_name
        own = self._properties.of(kind, name)
        configs = checked(kind, _after(own, r, TABLES[kind], whole), self._config, name=name)
        if kind is Kind.BROKER:
            self._check_broker(name, configs)
        asked = configs if whole else _named(configs, r, TABLES[kind])
        stored = (name or paths.ALL_BROKERS) if kind is Kind.BROKER else name
        return AlterConfig(None, CONFIG_OF[kind], stored, asked, whole=whole)

    def _check_broker(self, name: str, configs: Mapping[str, str]) -> None:
        """ConfigError where a broker cannot have these properties."""
        if name and (for_all := FOR_ALL_ONLY & configs.keys()):
            raise ConfigError(
                f"the broker's property {min(for_all)} cannot change while it runs",
                hint="set it for all brokers, whose name is empty",
            )
        if name in (ALL_BROKERS, self._broker_name):
            found = {w: self.dynamic(w) for w in (ALL_BROKERS, self._broker_name)}
            values = self._config.changed_by(*{**found, name: configs}.values())
            self._config.check_threads(values)


def _after(own: Mapping[str, str], r: Any, table: Options, whole: bool) -> dict[str, str]:
    """The properties of a resource after the request."""
    return {c.name: c.value for c in r.configs} if whole else changed(own, r, table)


def _changes_list(config: Any) -> bool:
    """Does the new value of a property depend on the one that it has?"""
    return operation_of(config) in (APPEND, SUBTRACT)


def _named(configs: Mapping[str, str], r: Any, table: Options) -> Properties:
    """Of the properties those that a request names; None: it is not set any more."""
    names = [table.find(c.name).name for c in r.configs if table.knows(c.name)]
    return {name: configs.get(name) for name in names}


def _shows(metadata: Metadata, wanted: AlterConfig) -> bool:
    """Does the picture have the properties as they were asked for?"""
    config: Mapping[str, str]
    if wanted.of is ConfigOf.BROKER:
        config = metadata.image.broker_configs.get(wanted.name, {})
    elif wanted.of is ConfigOf.TOPIC:
        topic = metadata.topic(wanted.name)
        if topic is None:
            return True
        config = topic.config
    else:
        config = metadata.image.other_configs.get((wanted.of.value, wanted.name), {})
    if wanted.whole:
        return dict(config) == {k: v for k, v in wanted.properties.items() if v is not None}
    return all(config.get(name) == value for name, value in wanted.properties.items())
