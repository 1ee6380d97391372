"""Requests about the replicas of this broker: DescribeLogDirs, AlterReplicaLogDirs, and kdirect's
DescribeReplicas.

Owns: what is said of the directories that replicas are in, and of how they get their records, and
what is asked of them.  An answer about many partitions is made on a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.directory_moves import directory_of
from kdirect.broker.handlers_cluster import MANY_PARTITIONS
from kdirect.broker.services import Services
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.replica_fetch import Feed, Feeding
from kdirect.log.future_copy import NAME_BYTES, future_name
from kdirect.model import TopicPartition


class LogDirHandlers:
    """See the module.  A broker has one, used on its event loop."""

    def __init__(self, services: Services) -> None:
        self._logs = services.logs
        self._files = services.files
        self._mover = services.mover
        self._replicas = services.replicas
        self._topics = services.topics

    def describe_log_dirs(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._files.read(self._describe_log_dirs, header, request))

    def _describe_log_dirs(self, header: p.RequestHeader, request: Any) -> Answer:
        wanted = (
            None
            if request.topics is None
            else {TopicPartition(t.topic, i) for t in request.topics for i in t.partitions}
        )
        results = []
        # At once: a partition may move meanwhile, and is in one directory all the same.
        here = [(tp, x, x.directory.parent) for tp, x in list(self._logs.partitions.items())]
        futures = self._logs.moves.futures()
        for directory in self._logs.log_dirs:
            topics: dict[str, list[dict[str, Any]]] = {}
            for tp, partition, place in here:
                if (wanted is None or tp in wanted) and place == directory:
                    row = {
                        "partition_index": tp.partition,
                        "partition_size": partition.size,
                        "offset_lag": 0,
                        "is_future_key": False,
                    }
                    topics.setdefault(tp.topic, []).append(row)
            for future in futures:
                tp = future.topic_partition
                if (wanted is None or tp in wanted) and future.directory == directory:
                    row = {
                        "partition_index": tp.partition,
                        "partition_size": future.size,
                        "offset_lag": future.lag,
                        "is_future_key": True,
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
            if directory in self._logs.offline:
                total, usable, error, topics = -1, -1, int(ErrorCode.KAFKA_STORAGE_ERROR), {}
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
        return respond(header, p.DescribeLogDirsResponse, error_code=0, results=results)

    def alter_replica_log_dirs(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._alter_replica_log_dirs(header, request))

    async def _alter_replica_log_dirs(self, header: p.RequestHeader, request: Any) -> Answer:
        # The last directory that a request names for a partition counts, as for Kafka.
        wanted = {
            TopicPartition(t.name, i): d.path
            for d in request.dirs
            for t in d.topics
            for i in t.partitions
        }
        codes = await self._files.admin(
            lambda: {tp: self._move(tp, path) for tp, path in wanted.items()}
        )
        self._mover.wake()
        topics: dict[str, list[dict[str, int]]] = {}
        for tp, code in codes.items():
            row = {"partition_index": tp.partition, "error_code": int(code)}
            topics.setdefault(tp.topic, []).append(row)
        rows = [{"topic_name": name, "partitions": parts} for name, parts in topics.items()]
        return respond(header, p.AlterReplicaLogDirsResponse, results=rows)

    def _move(self, tp: TopicPartition, path: str) -> ErrorCode:
        """Have a partition moved, or made, in that log directory; Kafka's code, which is asked in
        Kafka's order.  File work."""
        if len(future_name(tp)) > NAME_BYTES:
            return ErrorCode.INVALID_TOPIC_EXCEPTION
        directory = directory_of(self._logs, path)
        if directory is None:
            return ErrorCode.LOG_DIR_NOT_FOUND
        if directory in self._logs.offline or tp in self._logs.lost:
            return ErrorCode.KAFKA_STORAGE_ERROR
        try:
            exists = self._logs.moves.ask(tp, directory)
        except OSError:  # it is in the log
            return ErrorCode.KAFKA_STORAGE_ERROR
        if exists:
            return ErrorCode.NONE
        topic = self._topics.find(tp.topic)
        if topic is None or not 0 <= tp.partition < topic.partition_count:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return ErrorCode.REPLICA_NOT_AVAILABLE

    def describe_replicas(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """How replicas here get their records; a broker that is alone leads them all."""
        replicas, partitions = self._replicas, self._logs.partitions
        feeds = replicas.feeding() if replicas is not None else {}
        wanted = None if request.topics is None else set(request.topics)
        described = sorted(
            tp
            for tp in (feeds if replicas is not None else partitions)
            if wanted is None or tp.topic in wanted
        )

        def answer() -> Answer:
            topics: dict[str, list[dict[str, Any]]] = {}
            for tp in described:
                row = feeds.get(tp, Feeding(Feed.LEADS))._asdict()
                topics.setdefault(tp.topic, []).append({"partition": tp.partition, **row})
            rows = [{"topic": name, "partitions": found} for name, found in topics.items()]
            return respond(header, p.DescribeReplicasResponse, error_code=0, topics=rows)

        if len(described) < MANY_PARTITIONS:
            return answer()
        return later(self._files.read(answer))  # 4 ms for 1,000, and others wait

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return (
            ("DescribeLogDirs", self.describe_log_dirs, True),
            ("AlterReplicaLogDirs", self.alter_replica_log_dirs, True),
            ("DescribeReplicas", self.describe_replicas, True),
        )
