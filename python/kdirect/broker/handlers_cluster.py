"""Requests about the cluster and its topics: ApiVersions, Metadata, topics, partitions, log
directories.

Errors are per topic; a request changes everything of a topic or nothing of it.  What changes topics
is file work: it runs on the admin thread, one request after the other, while the event loop answers
others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kdirect.broker.failures import code_of, explain
from kdirect.broker.topics import MAX_PARTITIONS, OFFSETS_TOPIC, Topic
from kdirect.errors import ConfigError, KdirectError, TopicExistsError
from kdirect.format import protocol as p
from kdirect.format.protocol import ErrorCode
from kdirect.format.schema import build
from kdirect.model import TopicPartition, check_topic_name

if TYPE_CHECKING:
    from kdirect.broker.connection import Connection
    from kdirect.broker.server import BrokerServer

BROKER_RESOURCE = 4
TOPIC_RESOURCE = 2
MANY_PARTITIONS = 100


class ClusterHandlers:
    """Handlers about the cluster; one for the broker."""

    def __init__(self, server: BrokerServer) -> None:
        self._server = server
        self._config = server.config
        self._node_id: int = server.config["node.id"]
        self._deletions = asyncio.Lock()
        self._deleting: set[asyncio.Task[Any]] = set()

    # -- versions ----------------------------------------------------------------------------------

    def api_versions(self, connection: Connection, header: p.RequestHeader, request: Any) -> Any:
        return self.versions(0)

    def versions(self, error: int) -> Any:
        """An ApiVersions response; with UNSUPPORTED_VERSION it goes out as version 0, whatever was
        asked."""
        keys = [
            {"api_key": a.key, "min_version": a.low, "max_version": a.high}
            for a in sorted(self._server.apis(), key=lambda a: a.key)
        ]
        return build(p.ApiVersionsResponse, error_code=error, api_keys=keys)

    # -- metadata ----------------------------------------------------------------------------------

    def metadata(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Any | Awaitable[Any]:
        version = header.api_version
        wanted = request.topics
        if wanted is None or (version == 0 and not wanted):
            return self._answer_metadata(connection, header, list(self._server.topics), ())
        create = self._config["auto.create.topics.enable"] and (
            version < 4 or request.allow_auto_topic_creation
        )
        if create and any(
            w.name is not None and self._server.topics.get(w.name) is None for w in wanted
        ):
            return self._metadata_created(connection, wanted)
        return self._answer_metadata(
            connection,
            header,
            [t for w in wanted if (t := self._server.topics.get(w.name or ""))],
            wanted,
        )

    def _answer_metadata(
        self, connection: Connection, header: p.RequestHeader, topics: list[Topic], wanted: Any
    ) -> Any | Awaitable[Any]:
        """Of `wanted`, or of all topics.  An answer about many partitions takes tens of ms: on a
        thread, which lets the event loop run."""

        def rows() -> list[dict[str, Any]]:
            return (
                [self._metadata_of(w, False) for w in wanted]
                if wanted
                else [self._topic_row(t) for t in topics]
            )

        if sum(t.partition_count for t in topics) < MANY_PARTITIONS:
            return self._metadata(connection, rows())
        return self._server.files.read(
            lambda: [self._metadata(connection, rows()).encode(version=header.api_version)]
        )

    async def _metadata_created(self, connection: Connection, wanted: Any) -> Any:
        rows = await self._server.files.admin(lambda: [self._metadata_of(w, True) for w in wanted])
        return self._metadata(connection, rows)

    def _metadata(self, connection: Connection, rows: list[dict[str, Any]]) -> Any:
        host, port = self._server.advertised(connection)
        return build(
            p.MetadataResponse,
            brokers=[{"node_id": self._node_id, "host": host, "port": port, "rack": None}],
            cluster_id=self._server.logs.cluster_id,
            controller_id=self._node_id,
            topics=rows,
        )

    def _metadata_of(self, wanted: Any, create: bool) -> dict[str, Any]:
        """With `create`: on the admin thread."""
        topics = self._server.topics
        # An id goes before a name, as in Kafka: some clients send an empty name with it.
        by_id = getattr(wanted, "topic_id", None)
        if by_id is not None or wanted.name is None:
            topic = topics.by_id(by_id)
            if topic is None or topic.deleting:
                return {
                    "error_code": ErrorCode.UNKNOWN_TOPIC_ID,
                    "name": None,
                    "topic_id": by_id,
                    "partitions": [],
                }
            return self._topic_row(topic)
        name = wanted.name
        missing = {
            "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            "name": name,
            "topic_id": None,
            "partitions": [],
        }
        topic = topics.get(name)
        if topic is not None:
            return missing if topic.deleting else self._topic_row(topic)
        try:
            check_topic_name(name)
            if not create:
                return missing
            if name == OFFSETS_TOPIC:
                return self._topic_row(self._server.offsets.create_topic())
            return self._topic_row(topics.create(name, self._config["num.partitions"], {}))
        except ConfigError:
            return {**missing, "error_code": ErrorCode.INVALID_TOPIC_EXCEPTION}
        except KdirectError as e:
            return {**missing, "error_code": explain(e, f"creation of topic {name}")[0]}

    def _partition_row(self, topic: Topic, index: int) -> dict[str, Any]:
        partition = self._server.logs.partitions.get(TopicPartition(topic.name, index))
        me = [self._node_id]
        if partition is None:  # its directory could not be made
            return {
                "error_code": ErrorCode.LEADER_NOT_AVAILABLE,
                "partition_index": index,
                "leader_id": -1,
                "leader_epoch": -1,
                "replica_nodes": me,
                "isr_nodes": [],
                "offline_replicas": me,
            }
        return {
            "error_code": 0,
            "partition_index": index,
            "leader_id": self._node_id,
            "leader_epoch": partition.leader_epoch,
            "replica_nodes": me,
            "isr_nodes": me,
            "offline_replicas": [],
        }

    def _topic_row(self, topic: Topic) -> dict[str, Any]:
        return {
            "error_code": 0,
            "name": topic.name,
            "topic_id": topic.topic_id,
            "is_internal": topic.internal,
            "partitions": [self._partition_row(topic, i) for i in range(topic.partition_count)],
        }

    def describe_topic_partitions(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Any:
        """In name order from the cursor on, at most `response_partition_limit` partitions.  No
        names: all topics."""
        left = max(1, min(request.response_partition_limit, 2000))
        asked = {t.name for t in request.topics}
        names = sorted(asked or {t.name for t in self._server.topics if not t.deleting})
        first = 0
        if request.cursor is not None:
            names = [n for n in names if n >= request.cursor.topic_name]
            first = (
                max(0, request.cursor.partition_index)
                if names and names[0] == request.cursor.topic_name
                else 0
            )
        rows: list[dict[str, Any]] = []
        cursor = None
        for name in names:
            if left <= 0:
                cursor = {"topic_name": name, "partition_index": 0}
                break
            topic = self._server.topics.get(name)
            if topic is None or topic.deleting:
                rows.append(
                    {
                        "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                        "name": name,
                        "topic_id": None,
                        "partitions": [],
                    }
                )
                first = 0
                continue
            end = min(topic.partition_count, first + left)
            # Empty, not null, though the schema allows null: Java's client walks through both.
            parts = [
                {
                    **self._partition_row(topic, i),
                    "eligible_leader_replicas": [],
                    "last_known_elr": [],
                }
                for i in range(first, end)
            ]
            rows.append(
                {
                    "error_code": 0,
                    "name": name,
                    "topic_id": topic.topic_id,
                    "is_internal": topic.internal,
                    "partitions": parts,
                }
            )
            left -= len(parts)
            if end < topic.partition_count:
                cursor = {"topic_name": name, "partition_index": end}
                break
            first = 0
        return build(p.DescribeTopicPartitionsResponse, topics=rows, next_cursor=cursor)

    def describe_cluster(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Any:
        host, port = self._server.advertised(connection)
        return build(
            p.DescribeClusterResponse, error_code=0, error_message=None, endpoint_type=1, cluster_id=self._server.logs.cluster_id,
            controller_id=self._node_id, brokers=[{"broker_id": self._node_id, "host": host, "port": port, "rack": None}],
        )  # fmt: skip

    async def describe_log_dirs(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Any:
        return await self._server.files.read(self._describe_log_dirs, request)

    def _describe_log_dirs(self, request: Any) -> Any:
        wanted = (
            None
            if request.topics is None
            else {TopicPartition(t.topic, i) for t in request.topics for i in t.partitions}
        )
        results = []
        for directory in self._server.logs.log_dirs:
            topics: dict[str, list[dict[str, Any]]] = {}
            for tp, partition in list(self._server.logs.partitions.items()):
                if (wanted is None or tp in wanted) and partition.directory.parent == directory:
                    row = {
                        "partition_index": tp.partition,
                        "partition_size": partition.size,
                        "offset_lag": 0,
                        "is_future_key": False,
                    }
                    topics.setdefault(tp.topic, []).append(row)
            try:
                stat = os.statvfs(directory)
                total, usable, error = (
                    stat.f_blocks * stat.f_frsize,
                    stat.f_bavail * stat.f_frsize,
                    0,
                )
            except OSError:
                total, usable, error = -1, -1, int(ErrorCode.KAFKA_STORAGE_ERROR)
            rows = [{"name": name, "partitions": parts} for name, parts in topics.items()]
            results.append(
                {
                    "error_code": error,
                    "log_dir": str(directory),
                    "topics": rows,
                    "total_bytes": total,
                    "usable_bytes": usable,
                }
            )
        return build(p.DescribeLogDirsResponse, error_code=0, results=results)

    # -- topics ------------------------------------------------------------------------------------

    async def create_topics(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Any:
        return await self._server.files.admin(self._create_all, request)

    def _create_all(self, request: Any) -> Any:
        names = [t.name for t in request.topics]
        rows: list[dict[str, Any]] = []
        left = MAX_PARTITIONS
        for wanted in {t.name: t for t in request.topics}.values():
            rows.append(
                self._create(wanted, request.validate_only, names.count(wanted.name) > 1, left)
            )
            left -= max(0, rows[-1]["num_partitions"])
        return build(p.CreateTopicsResponse, topics=rows)

    def _create(self, wanted: Any, validate_only: bool, twice: bool, left: int) -> dict[str, Any]:
        """`left`: how many partitions the request may still ask for."""

        def refused(code: int, message: str) -> dict[str, Any]:
            return {
                "name": wanted.name,
                "topic_id": None,
                "error_code": code,
                "error_message": message,
                "num_partitions": -1,
                "replication_factor": -1,
                "configs": [],
            }

        if twice:
            return refused(
                ErrorCode.INVALID_REQUEST, f"topic {wanted.name} is in the request twice"
            )
        try:
            check_topic_name(wanted.name)
        except ConfigError as e:
            return refused(ErrorCode.INVALID_TOPIC_EXCEPTION, str(e))
        partitions = wanted.num_partitions
        if wanted.assignments:
            problem = self._bad_assignment([a.broker_ids for a in wanted.assignments])
            if sorted(a.partition_index for a in wanted.assignments) != list(
                range(len(wanted.assignments))
            ):
                problem = "partitions of an assignment are numbered from 0 without gaps"
            if problem or wanted.num_partitions != -1 or wanted.replication_factor != -1:
                return refused(
                    ErrorCode.INVALID_REPLICA_ASSIGNMENT if problem else ErrorCode.INVALID_REQUEST,
                    problem
                    or "give an assignment, or numbers of partitions and replicas, not both",
                )
            partitions = len(wanted.assignments)
        elif partitions == -1:
            partitions = self._config["num.partitions"]
        if wanted.replication_factor not in (-1, 1):
            return refused(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"replication factor {wanted.replication_factor}: there is one broker; use 1",
            )
        if not 1 <= partitions <= left:
            return refused(
                ErrorCode.INVALID_PARTITIONS,
                f"{partitions} partitions; give at least 1, at most {MAX_PARTITIONS} in a request",
            )
        topics = self._server.topics
        configs = {c.name: c.value for c in wanted.configs}
        try:
            if validate_only:
                checked = topics.check_new(wanted.name, partitions, configs)
                topic = Topic(wanted.name, None, partitions, checked)  # type: ignore[arg-type]
            else:
                topic = topics.create(wanted.name, partitions, configs)
            rows = self._server.configs.topic_rows(topic)
        except TopicExistsError as e:
            return refused(ErrorCode.TOPIC_ALREADY_EXISTS, str(e))
        except ConfigError as e:
            return refused(code_of(e), str(e))
        except KdirectError as e:
            return refused(*explain(e, f"creation of topic {wanted.name}"))
        shown = [
            {k: row[k] for k in ("name", "value", "read_only", "config_source", "is_sensitive")}
            for row in rows
        ]
        return {
            "name": wanted.name,
            "topic_id": topic.topic_id,
            "error_code": 0,
            "error_message": None,
            "num_partitions": partitions,
            "replication_factor": 1,
            "configs": shown,
        }

    def _bad_assignment(self, assignments: Iterable[list[int]]) -> str:
        for brokers in assignments:
            if brokers != [self._node_id]:
                return f"replicas {brokers}: the only broker is {self._node_id}"
        return ""

    async def delete_topics(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Any:
        if header.api_version >= 6:
            wanted = [(t.name, t.topic_id) for t in request.topics]
        else:
            wanted = [(name, None) for name in request.topic_names]
        # On a task of its own: a client that goes ends its request, but not a deletion whose files
        # are going already.
        task = asyncio.ensure_future(self._delete_all(wanted))
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)
        return await asyncio.shield(task)

    async def _delete_all(self, wanted: Sequence[tuple[str | None, Any]]) -> Any:
        async with self._deletions:
            return build(
                p.DeleteTopicsResponse,
                responses=[await self._delete(name, topic_id) for name, topic_id in wanted],
            )

    async def _delete(self, name: str | None, topic_id: Any) -> dict[str, Any]:
        topics = self._server.topics
        named = name is not None and (
            name != "" or topic_id is None
        )  # an empty name with an id is none
        topic = topics.get(name or "") if named else topics.by_id(topic_id)
        out = {"name": name, "topic_id": topic_id, "error_code": 0, "error_message": None}
        if topic is None:  # one that is being deleted stays when that failed: it may be tried again
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if named else ErrorCode.UNKNOWN_TOPIC_ID
            return {**out, "error_code": code, "error_message": "there is no such topic"}
        out.update(name=topic.name, topic_id=topic.topic_id)
        if not self._config["delete.topic.enable"]:
            return {
                **out,
                "error_code": ErrorCode.TOPIC_DELETION_DISABLED,
                "error_message": "delete.topic.enable is false",
            }
        if topic.internal:
            return {
                **out,
                "error_code": ErrorCode.INVALID_REQUEST,
                "error_message": f"topic {topic.name} is the broker's own",
            }
        try:
            await self._server.delete_topic(topic)
        except (KdirectError, OSError) as e:
            refused = explain(e, f"deletion of topic {topic.name}")
            return {**out, "error_code": refused[0], "error_message": refused[1]}
        return out

    async def create_partitions(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Any:
        return await self._server.files.admin(self._grow_all, request)

    def _grow_all(self, request: Any) -> Any:
        rows: list[dict[str, Any]] = []
        left = MAX_PARTITIONS
        for wanted in request.topics:
            topic = self._server.topics.get(wanted.name)
            before = topic.partition_count if topic is not None else 0
            rows.append(self._grow(wanted, request.validate_only, left))
            if rows[-1]["error_code"] == 0:
                left -= wanted.count - before
        return build(p.CreatePartitionsResponse, results=rows)

    def _grow(self, wanted: Any, validate_only: bool, left: int) -> dict[str, Any]:
        """`left`: how many partitions the request may still ask for."""

        def result(code: int, message: str | None) -> dict[str, Any]:
            return {"name": wanted.name, "error_code": code, "error_message": message}

        topic = self._server.topics.get(wanted.name)
        if topic is None or topic.deleting:
            return result(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {wanted.name}")
        if topic.internal:
            return result(ErrorCode.INVALID_REQUEST, f"topic {topic.name} is the broker's own")
        if wanted.count <= topic.partition_count:
            return result(
                ErrorCode.INVALID_PARTITIONS,
                f"topic {topic.name} has {topic.partition_count} partitions; they can only become more",
            )
        if wanted.count > MAX_PARTITIONS or wanted.count - topic.partition_count > left:
            return result(
                ErrorCode.INVALID_PARTITIONS,
                f"{wanted.count} partitions; give at most {MAX_PARTITIONS}, of all topics of a request together",
            )
        if wanted.assignments is not None:
            problem = self._bad_assignment([a.broker_ids for a in wanted.assignments])
            if problem or len(wanted.assignments) != wanted.count - topic.partition_count:
                return result(
                    ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                    problem or "an assignment covers each new partition",
                )
        try:
            if not validate_only:
                self._server.topics.grow(topic, wanted.count)
        except KdirectError as e:
            return result(*explain(e, f"growth of topic {topic.name}"))
        return result(0, None)

    def elect_leaders(self, connection: Connection, header: p.RequestHeader, request: Any) -> Any:
        if request.topic_partitions is None:
            return build(p.ElectLeadersResponse, error_code=0, replica_election_results=[])
        results = []
        for t in request.topic_partitions:
            rows = []
            for i in t.partitions:
                exists = TopicPartition(t.topic, i) in self._server.logs.partitions
                code = (
                    ErrorCode.ELECTION_NOT_NEEDED
                    if exists
                    else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                )
                rows.append({"partition_id": i, "error_code": code, "error_message": None})
            results.append({"topic": t.topic, "partition_result": rows})
        return build(p.ElectLeadersResponse, error_code=0, replica_election_results=results)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("ApiVersions", self.api_versions, True),
            ("Metadata", self.metadata, True),
            ("DescribeTopicPartitions", self.describe_topic_partitions, True),
            ("DescribeCluster", self.describe_cluster, True),
            ("DescribeLogDirs", self.describe_log_dirs, True),
            ("CreateTopics", self.create_topics, True),
            ("DeleteTopics", self.delete_topics, True),
            ("CreatePartitions", self.create_partitions, True),
            ("ElectLeaders", self.elect_leaders, True),
        )
