"""Requests about the replicas of this broker: DescribeLogDirs, and kdirect's DescribeReplicas.

Owns: what is said of the directories that replicas are in, and of how they get their records.  An
answer about many partitions is made on a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.handlers_cluster import MANY_PARTITIONS
from kdirect.broker.services import Services
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.replica_fetch import Feed, Feeding
from kdirect.model import TopicPartition


class LogDirHandlers:
    """See the module.  A broker has one, used on its event loop."""

    def __init__(self, services: Services) -> None:
        self._logs = services.logs
        self._files = services.files
        self._replicas = services.replicas

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
        for directory in self._logs.log_dirs:
            topics: dict[str, list[dict[str, Any]]] = {}
            for tp, partition in list(self._logs.partitions.items()):
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
            ("DescribeReplicas", self.describe_replicas, True),
        )
