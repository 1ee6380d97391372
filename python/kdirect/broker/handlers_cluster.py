"""Requests about the cluster and its topics: Metadata, topics and partitions.

An error concerns one topic.  A request changes all that it asks of a topic, or nothing of it.
Changing topics is file work: it runs on the admin thread, one request after the other, while the
event loop answers other requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.cluster_view import NO_NODE, ClusterView, Node, PlacedTopic
from kdirect.broker.connection import Connection
from kdirect.broker.failures import code_of, explain
from kdirect.broker.operations import ON_CLUSTER, ON_TOPIC, allowed, as_number
from kdirect.broker.services import Services
from kdirect.broker.topic_requests import (
    Deletion,
    configs_of,
    deletions,
    name_error,
    named_twice,
)
from kdirect.broker.topics import (
    MAX_PARTITIONS,
    OFFSETS_TOPIC,
    REMOTE_METADATA_TOPIC,
    TRANSACTIONS_TOPIC,
    Topic,
)
from kdirect.errors import ConfigError, KdirectError, TopicExistsError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.log.checkpoint import new_id
from kdirect.model import TopicPartition, check_topic_name

BROKER_RESOURCE = 4
TOPIC_RESOURCE = 2
MANY_PARTITIONS = 100
_BROKERS, _CONTROLLERS = 1, 2  # types of endpoints (KIP-919)
TOPICS_ARE_FIXED = "the layout of the cluster names every topic; change it, and restart the brokers"
MOST_ROWS = 2000  # partitions in one answer to DescribeTopicPartitions
_NAMES_ONLY = range(10, 12)  # versions of Metadata with ids that find nothing (KIP-516)
_CLUSTER_OPERATIONS = range(8, 11)  # versions of Metadata that tell of them; later DescribeCluster


def _missing(name: str | None) -> dict[str, Any]:
    """The row of a topic that does not exist."""
    return {
        "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        "name": name,
        "topic_id": None,
        "partitions": [],
    }


def _coming(name: str) -> dict[str, Any]:
    """The row of a topic that this request has created: no partitions yet, ask again.  Kafka
    answers so too, and clients' tests that a topic is gone ask for it by a request that creates."""
    return {**_missing(name), "error_code": ErrorCode.LEADER_NOT_AVAILABLE}


class _Told(NamedTuple):
    """What one answer tells of the cluster: a view that does not change meanwhile, and its brokers.
    Taken apart, they could name a leader that is none of the brokers.  `on_cluster`, `on_topic`:
    what the client may do, None where it has not asked."""

    cluster: ClusterView
    nodes: Sequence[Node]
    on_cluster: frozenset[int] | None = None
    on_topic: frozenset[int] | None = None


def _metadata(header: p.RequestHeader, told: _Told, rows: list[dict[str, Any]]) -> Answer:
    for row in rows:
        row["authorized_operations"] = told.on_topic if row["name"] is not None else None
    return respond(
        header,
        p.MetadataResponse,
        brokers=[
            {"node_id": n.node_id, "host": n.host, "port": n.port, "rack": n.rack}
            for n in told.nodes
        ],
        cluster_id=told.cluster.cluster_id,
        controller_id=told.cluster.controller_id,
        topics=rows,
        authorized_operations=told.on_cluster,
    )


def _refused_metadata(header: p.RequestHeader, wanted: Any) -> Answer:
    """Kafka's answer to topics without a name, in versions that have ids and do not use them."""
    code = ErrorCode.INVALID_REQUEST
    rows = [{**_missing(w.name or ""), "topic_id": w.topic_id, "error_code": code} for w in wanted]
    return respond(
        header,
        p.MetadataResponse,
        brokers=[],
        cluster_id=None,
        controller_id=NO_NODE,
        topics=rows,
    )


def _partition_row(cluster: ClusterView, name: str, index: int) -> dict[str, Any]:
    view = cluster.partition(TopicPartition(name, index))
    return {
        "error_code": 0 if view.leader != NO_NODE else ErrorCode.LEADER_NOT_AVAILABLE,
        "partition_index": index,
        "leader_id": view.leader,
        "leader_epoch": view.leader_epoch,
        "replica_nodes": list(view.replicas),
        "isr_nodes": list(view.in_sync),
        "offline_replicas": list(view.offline),
    }


def _topic_row(cluster: ClusterView, topic: Topic | PlacedTopic) -> dict[str, Any]:
    return {
        "error_code": 0,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.internal,
        "partitions": [
            _partition_row(cluster, topic.name, i) for i in range(topic.partition_count)
        ],
    }


def _is_bad_cursor(request: Any) -> bool:
    cursor = request.cursor
    if cursor is None:
        return False
    names = {t.name for t in request.topics}
    return cursor.partition_index < 0 or (bool(names) and cursor.topic_name not in names)


def _other_endpoints(header: p.RequestHeader, kind: int) -> Answer:
    """Who asks for controllers asks the wrong listener; there are no others."""
    if kind == _CONTROLLERS:
        code, text = ErrorCode.MISMATCHED_ENDPOINT_TYPE, "The request was sent to a broker listener"
    else:
        code, text = ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, f"Unsupported endpoint type {kind}"
    return respond(
        header,
        p.DescribeClusterResponse,
        error_code=code,
        error_message=text,
        endpoint_type=_BROKERS,
        cluster_id="",
        controller_id=NO_NODE,
        brokers=[],
    )


class ClusterHandlers:
    """Handlers of requests about the cluster.  A broker has one, used on its event loop.

    `config_rows(topic)` returns the properties of a topic, in the form of DescribeConfigs.
    `delete_topic(topic)` removes everything that the broker holds for a topic.
    `create_missing(names)`: in a cluster, has the controller create topics that a client asks for,
    and returns the error codes of those that it does not; None: this broker creates them.
    """

    def __init__(
        self,
        services: Services,
        *,
        config_rows: Callable[[Topic], list[dict[str, Any]]],
        delete_topic: Callable[[Topic], Awaitable[None]],
        create_missing: Callable[[Iterable[str]], Awaitable[dict[str, int]]] | None = None,
    ) -> None:
        self._services = services
        self._config = services.config
        self._cluster = services.cluster
        self._topics = services.topics
        self._files = services.files
        self._config_rows = config_rows
        self._delete_topic = delete_topic
        self._create_missing = create_missing
        self._deletions = asyncio.Lock()
        self._deleting: set[asyncio.Task[Any]] = set()

    # -- metadata ----------------------------------------------------------------------------------

    def metadata(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        version = header.api_version
        told = self._told(connection, header, request)
        wanted = request.topics
        if wanted and version in _NAMES_ONLY and any(w.name is None or w.topic_id for w in wanted):
            return _refused_metadata(header, wanted)
        if wanted is None or (version == 0 and not wanted):
            return self._answer_metadata(header, told, self._topics.all_topics(), ())
        wanted = list({(w.name, getattr(w, "topic_id", None)): w for w in wanted}.values())
        create = self._config["auto.create.topics.enable"] and (
            version < 4 or request.allow_auto_topic_creation
        )
        names = [w.name for w in wanted if w.name is not None]
        if create and any(self._topics.find(name) is None for name in names):
            if self._create_missing is not None:
                return later(self._metadata_asked(connection, header, names, request, wanted))
            return later(self._metadata_created(header, told, wanted))
        found = [t for w in wanted if (t := self._topics.find(w.name or ""))]
        return self._answer_metadata(header, told, found, wanted)

    def _answer_metadata(
        self,
        header: p.RequestHeader,
        told: _Told,
        topics: list[Topic | PlacedTopic],
        wanted: Any,
    ) -> Answer:
        """Describe the topics of `wanted`, or all of `topics` if it is empty.  An answer about many
        partitions takes tens of ms to make, so it is made on a thread."""

        def answer() -> Answer:
            rows = (
                [self._metadata_of(told.cluster, w, False) for w in wanted]
                if wanted
                else [_topic_row(told.cluster, t) for t in topics]
            )
            return _metadata(header, told, rows)

        if sum(t.partition_count for t in topics) < MANY_PARTITIONS:
            return answer()
        return later(self._files.read(answer))

    async def _metadata_created(self, header: p.RequestHeader, told: _Told, wanted: Any) -> Answer:
        rows = await self._files.admin(
            lambda: [self._metadata_of(told.cluster, w, True) for w in wanted]
        )
        return _metadata(header, told, rows)

    async def _metadata_asked(
        self,
        connection: Connection,
        header: p.RequestHeader,
        names: Sequence[str],
        request: Any,
        wanted: Any,
    ) -> Answer:
        """The same in a cluster: the controller creates what is missing."""
        assert self._create_missing is not None
        missing = {n for n in names if self._topics.find(n) is None}
        refused = await self._create_missing(missing)
        told = self._told(connection, header, request)
        rows = [self._metadata_of(told.cluster, w, False) for w in wanted]
        for place, row in enumerate(rows):
            if row["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or (
                row["error_code"] == ErrorCode.NONE and row["name"] in missing
            ):
                rows[place] = _coming(row["name"])
                rows[place]["error_code"] = refused.get(row["name"], ErrorCode.LEADER_NOT_AVAILABLE)
        return _metadata(header, told, rows)

    def _told(self, connection: Connection, header: p.RequestHeader, request: Any) -> _Told:
        """What the client of `connection` is told, with each broker at the address where that
        client reaches it."""
        own = self._services.listeners.address_for(connection.listener, connection.local[0])
        cluster = self._cluster.as_of_now()
        listener = self._config.listeners[connection.listener].name
        version = header.api_version
        if header.api_key == p.MetadataRequest.API_KEY:
            asks = version in _CLUSTER_OPERATIONS and request.include_cluster_authorized_operations
            on_topic = allowed(
                ON_TOPIC, version >= 8 and request.include_topic_authorized_operations
            )
        else:
            asks, on_topic = request.include_cluster_authorized_operations, None
        on_cluster = allowed(ON_CLUSTER, asks)
        return _Told(cluster, cluster.nodes(own, listener), on_cluster, on_topic)

    def _metadata_of(self, cluster: ClusterView, wanted: Any, create: bool) -> dict[str, Any]:
        """The row of one requested topic.  With `create`, a missing one is created; this must run
        on the admin thread."""
        topics = self._topics
        # An id takes precedence over a name, as in Kafka: some clients send an empty name with it.
        by_id = getattr(wanted, "topic_id", None)
        if by_id is not None or wanted.name is None:
            topic = topics.find_by_id(by_id)
            if topic is None or topic.deleting:
                return {
                    **_missing(None),
                    "error_code": ErrorCode.UNKNOWN_TOPIC_ID,
                    "topic_id": by_id,
                }
            return _topic_row(cluster, topic)
        name = wanted.name
        topic = topics.find(name)
        if topic is not None:
            return _missing(name) if topic.deleting else _topic_row(cluster, topic)
        try:
            check_topic_name(name)
            if not create:
                return _missing(name)
            if name == OFFSETS_TOPIC:
                self._services.offsets.create_topic()
            elif name == TRANSACTIONS_TOPIC:
                self._services.transactions.create_topic()
            elif self._cluster.topics_are_fixed or name == REMOTE_METADATA_TOPIC:
                return _missing(name)
            else:
                topics.create(name, self._config["num.partitions"], {})
            return _coming(name)
        except ConfigError:
            return {**_missing(name), "error_code": ErrorCode.INVALID_TOPIC_EXCEPTION}
        except KdirectError as e:
            return {**_missing(name), "error_code": explain(e, f"creation of topic {name}")[0]}

    def describe_topic_partitions(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """Describe topics in the order of their names, from the request's cursor on, up to
        `response_partition_limit` and MOST_ROWS partitions.  A request without names asks for all
        topics.  A cursor that is none, or that names a topic which was not asked for, is an error
        of each topic, as in Kafka."""
        if _is_bad_cursor(request):
            code = ErrorCode.INVALID_REQUEST
            rows = [{**_missing(t.name), "error_code": code} for t in request.topics]
            return respond(header, p.DescribeTopicPartitionsResponse, topics=rows)
        left = max(1, min(request.response_partition_limit, MOST_ROWS))
        asked = {t.name for t in request.topics}
        names = sorted(asked or {t.name for t in self._topics.all_topics()})
        first = 0
        if request.cursor is not None:
            names = [n for n in names if n >= request.cursor.topic_name]
            if names and names[0] == request.cursor.topic_name:
                first = max(0, request.cursor.partition_index)
        rows = []
        cursor = None
        for name in names:
            if left <= 0:
                cursor = {"topic_name": name, "partition_index": 0}
                break
            topic = self._topics.find(name)
            if topic is None or topic.deleting:
                rows.append(_missing(name))
                rows[-1]["error_code"] = name_error(name) or rows[-1]["error_code"]
                first = 0
                continue
            end = min(topic.partition_count, first + left)
            rows.append(self._described(topic, first, end))
            left -= max(0, end - first)
            if end < topic.partition_count:
                cursor = {"topic_name": name, "partition_index": end}
                break
            first = 0
        for row in rows:
            row["topic_authorized_operations"] = as_number(ON_TOPIC)
        return respond(header, p.DescribeTopicPartitionsResponse, topics=rows, next_cursor=cursor)

    def _described(self, topic: Topic | PlacedTopic, first: int, end: int) -> dict[str, Any]:
        """Partitions [first, end) of a topic, in the form of DescribeTopicPartitions."""
        rows = []
        for i in range(first, end):
            eligible = self._cluster.partition(TopicPartition(topic.name, i)).eligible
            # Lists, not null: the schema allows null, but Java's client iterates over both.
            extra: dict[str, list[int]] = {
                "eligible_leader_replicas": list(eligible),
                "last_known_elr": [],
            }
            rows.append({**_partition_row(self._cluster, topic.name, i), **extra})
        return {
            "error_code": 0,
            "name": topic.name,
            "topic_id": topic.topic_id,
            "is_internal": topic.internal,
            "partitions": rows,
        }

    def describe_cluster(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        if header.api_version >= 1 and request.endpoint_type != _BROKERS:
            return _other_endpoints(header, request.endpoint_type)
        told = self._told(connection, header, request)
        return respond(
            header,
            p.DescribeClusterResponse,
            error_code=0,
            error_message=None,
            endpoint_type=_BROKERS,
            cluster_id=told.cluster.cluster_id,
            controller_id=told.cluster.controller_id,
            brokers=[
                {"broker_id": n.node_id, "host": n.host, "port": n.port, "rack": n.rack}
                for n in told.nodes
            ],
            authorized_operations=told.on_cluster,
        )

    # -- topics ------------------------------------------------------------------------------------

    def create_topics(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._files.admin(self._create_all, header, request))

    def _create_all(self, header: p.RequestHeader, request: Any) -> Answer:
        names = [t.name for t in request.topics]
        rows: list[dict[str, Any]] = []
        left = MAX_PARTITIONS
        for wanted in {t.name: t for t in request.topics}.values():
            if names.count(wanted.name) > 1:
                error = f"topic {wanted.name} is in the request twice"
                rows.append(not_created(wanted.name, ErrorCode.INVALID_REQUEST, error))
                continue
            rows.append(self._create(wanted, request.validate_only, left))
            left -= max(0, rows[-1]["num_partitions"])
        return respond(header, p.CreateTopicsResponse, topics=rows)

    def _create(self, wanted: Any, validate_only: bool, left: int) -> dict[str, Any]:
        """`left`: how many partitions the request may still ask for."""
        name = wanted.name
        refusal = self._creation_refused(wanted)
        if refusal is not None:
            return not_created(name, *refusal)
        if wanted.assignments:
            partitions = len(wanted.assignments)
        elif wanted.num_partitions == -1:
            partitions = self._config["num.partitions"]
        else:
            partitions = wanted.num_partitions
        if not 1 <= partitions <= left:
            return not_created(
                name,
                ErrorCode.INVALID_PARTITIONS,
                f"{partitions} partitions; give at least 1, at most {MAX_PARTITIONS} in a request",
            )
        try:
            configs = configs_of(wanted)
            if validate_only:
                checked = self._topics.check_new(name, partitions, configs)
                topic = Topic(name, new_id(), partitions, dict(checked))
            else:
                topic = self._topics.create(name, partitions, configs)
            rows = self._config_rows(topic)
        except TopicExistsError as e:
            return not_created(name, ErrorCode.TOPIC_ALREADY_EXISTS, str(e))
        except ConfigError as e:
            return not_created(name, code_of(e), str(e))
        except KdirectError as e:
            return not_created(name, *explain(e, f"creation of topic {name}"))
        return created(topic, 1, rows)

    def _creation_refused(self, wanted: Any) -> tuple[int, str] | None:
        """Why a topic of this name, with these replicas, cannot be created here: (code, text)."""
        try:
            check_topic_name(wanted.name)
        except ConfigError as e:
            return ErrorCode.INVALID_TOPIC_EXCEPTION, str(e)
        if not self._cluster.leads(wanted.name):
            leader = self._cluster.leader_of(wanted.name)
            return ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {wanted.name} exists at broker {leader}"
        if self._topics.find(wanted.name) is not None:  # as Kafka: before all else about it
            return ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {wanted.name} already exists"
        if self._cluster.topics_are_fixed:
            return ErrorCode.POLICY_VIOLATION, TOPICS_ARE_FIXED
        if wanted.assignments:
            problem = self._cluster.bad_assignment(a.broker_ids for a in wanted.assignments)
            if sorted(a.partition_index for a in wanted.assignments) != list(
                range(len(wanted.assignments))
            ):
                problem = "partitions of an assignment are numbered from 0 without gaps"
            if problem:
                return ErrorCode.INVALID_REPLICA_ASSIGNMENT, problem
            if wanted.num_partitions != -1 or wanted.replication_factor != -1:
                return (
                    ErrorCode.INVALID_REQUEST,
                    "give an assignment, or numbers of partitions and replicas, not both",
                )
        problem = self._cluster.bad_replication_factor(wanted.replication_factor)
        return (ErrorCode.INVALID_REPLICATION_FACTOR, problem) if problem else None

    def delete_topics(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._delete_topics(header, request))

    async def _delete_topics(self, header: p.RequestHeader, request: Any) -> Answer:
        wanted = deletions(request, header.api_version)
        # In a task of its own: a client that disconnects cancels its request, but must not cancel a
        # deletion whose files are being removed already.
        task = asyncio.ensure_future(self._delete_all(header, wanted))
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)
        return await asyncio.shield(task)

    async def _delete_all(self, header: p.RequestHeader, wanted: Sequence[Deletion]) -> Answer:
        async with self._deletions:
            rows = [await self._delete(deletion) for deletion in wanted]
        return respond(header, p.DeleteTopicsResponse, responses=rows)

    async def _delete(self, deletion: Deletion) -> dict[str, Any]:
        name, topic_id, refusal = deletion
        named = name is not None
        topic = self._topics.get(name or "") if named else self._topics.by_id(topic_id)
        out = {"name": name, "topic_id": topic_id, "error_code": 0, "error_message": None}
        if self._cluster.topics_are_fixed:
            code = ErrorCode.POLICY_VIOLATION
            return {**out, "error_code": code, "error_message": TOPICS_ARE_FIXED}
        if refusal is not None:
            return {**out, "error_code": refusal[0], "error_message": refusal[1]}
        # A topic whose deletion failed still exists here, so it can be deleted again.
        if topic is None:
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if named else ErrorCode.UNKNOWN_TOPIC_ID
            return {**out, "error_code": code, "error_message": "there is no such topic"}
        out.update(name=topic.name, topic_id=topic.topic_id)
        refusal = self._deletion_refused(topic)
        if refusal is not None:
            return {**out, "error_code": refusal[0], "error_message": refusal[1]}
        try:
            await self._delete_topic(topic)
        except (KdirectError, OSError) as e:
            failure, message = explain(e, f"deletion of topic {topic.name}")
            return {**out, "error_code": failure, "error_message": message}
        return out

    def _deletion_refused(self, topic: Topic) -> tuple[int, str] | None:
        if not self._config["delete.topic.enable"]:
            return ErrorCode.TOPIC_DELETION_DISABLED, "delete.topic.enable is false"
        if topic.internal:
            return ErrorCode.INVALID_REQUEST, f"topic {topic.name} is the broker's own"
        return None

    def create_partitions(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._files.admin(self._grow_all, header, request))

    def _grow_all(self, header: p.RequestHeader, request: Any) -> Answer:
        rows: list[dict[str, Any]] = []
        left = MAX_PARTITIONS
        twice = named_twice(request.topics)
        for wanted in {t.name: t for t in request.topics}.values():
            if wanted.name in twice:
                rows.append(grown_twice(wanted.name))
                continue
            topic = self._topics.get(wanted.name)
            before = topic.partition_count if topic is not None else 0
            rows.append(self._grow(wanted, request.validate_only, left))
            if rows[-1]["error_code"] == 0:
                left -= wanted.count - before
        return respond(header, p.CreatePartitionsResponse, results=rows)

    def _grow(self, wanted: Any, validate_only: bool, left: int) -> dict[str, Any]:
        """`left`: how many partitions the request may still ask for."""

        def result(code: int, message: str | None) -> dict[str, Any]:
            return {"name": wanted.name, "error_code": code, "error_message": message}

        if self._cluster.topics_are_fixed:
            return result(ErrorCode.POLICY_VIOLATION, TOPICS_ARE_FIXED)
        topic = self._topics.get(wanted.name)
        if topic is None or topic.deleting:
            return result(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {wanted.name}")
        if topic.internal:
            return result(ErrorCode.INVALID_REQUEST, f"topic {topic.name} is the broker's own")
        if wanted.count <= topic.partition_count:
            return result(
                ErrorCode.INVALID_PARTITIONS,
                f"topic {topic.name} has {topic.partition_count} partitions;"
                " they can only become more",
            )
        if wanted.count > MAX_PARTITIONS or wanted.count - topic.partition_count > left:
            return result(
                ErrorCode.INVALID_PARTITIONS,
                f"{wanted.count} partitions; give at most {MAX_PARTITIONS},"
                " of all topics of a request together",
            )
        if wanted.assignments is not None:
            problem = self._cluster.bad_assignment(a.broker_ids for a in wanted.assignments)
            if problem or len(wanted.assignments) != wanted.count - topic.partition_count:
                return result(
                    ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                    problem or "an assignment covers each new partition",
                )
        try:
            if not validate_only:
                self._topics.grow(topic, wanted.count)
        except KdirectError as e:
            return result(*explain(e, f"growth of topic {topic.name}"))
        return result(0, None)

    def elect_leaders(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        kind = request.election_type if header.api_version >= 1 else 0
        refused = kind not in (0, 1)
        results: list[dict[str, Any]] = []
        if request.topic_partitions is None:
            # As in Kafka: of all partitions only those that get another leader are told.
            results = [{"topic": t.name, "partition_result": []} for t in self._topics.all_topics()]
        for t in request.topic_partitions or ():
            rows = []
            for i in t.partitions:
                view = self._cluster.partition(TopicPartition(t.topic, i))
                if refused:
                    code, text = ErrorCode.INVALID_REQUEST, f"there is no election of type {kind}"
                elif view.leader != NO_NODE:
                    code, text = ErrorCode.ELECTION_NOT_NEEDED, "the partition has its leader"
                else:
                    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                    text = f"there is no partition {t.topic}-{i}"
                rows.append({"partition_id": i, "error_code": code, "error_message": text})
            results.append({"topic": t.topic, "partition_result": rows})
        whole = ErrorCode.INVALID_REQUEST if refused else 0
        return respond(
            header, p.ElectLeadersResponse, error_code=whole, replica_election_results=results
        )

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("Metadata", self.metadata, True),
            ("DescribeTopicPartitions", self.describe_topic_partitions, True),
            ("DescribeCluster", self.describe_cluster, True),
            ("CreateTopics", self.create_topics, True),
            ("DeleteTopics", self.delete_topics, True),
            ("CreatePartitions", self.create_partitions, True),
            ("ElectLeaders", self.elect_leaders, True),
        )


def grown_twice(name: str) -> dict[str, Any]:
    """The row of a topic that a CreatePartitions request names twice."""
    text = f"topic {name} is in the request twice"
    return {"name": name, "error_code": ErrorCode.INVALID_REQUEST, "error_message": text}


def not_created(name: str, code: int, message: str | None) -> dict[str, Any]:
    """The row of a topic that was not created."""
    return {
        "name": name,
        "topic_id": None,
        "error_code": code,
        "error_message": message,
        "num_partitions": -1,
        "replication_factor": -1,
        "configs": [],
    }


def created(topic: Topic, factor: int, config_rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a topic that was created, or could be."""
    shown = ("name", "value", "read_only", "config_source", "is_sensitive")
    return {
        "name": topic.name,
        "topic_id": topic.topic_id,
        "error_code": 0,
        "error_message": None,
        "num_partitions": topic.partition_count,
        "replication_factor": factor,
        "configs": [{k: row[k] for k in shown} for row in config_rows],
    }
