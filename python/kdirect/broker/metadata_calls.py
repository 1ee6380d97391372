"""Questions of one broker to another about logs and metadata, in Kafka's messages and ours; asked
of this broker itself they go to its own handlers.

On the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdirect.broker.answers import Answer
from kdirect.errors import BrokerUnavailableError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import error_kind
from kdirect.format.schema import build
from kdirect.model import EARLIEST_OFFSET, TopicPartition

CALL_S = 5.0
_VERSIONS = {p.FetchRequest.API_KEY: 12}


class MetadataCalls:
    """See the module.  `here(api key)`: this broker's handler of such requests."""

    def __init__(
        self, node_id: int, peers: Any, here: Callable[[int], Callable[..., Answer]]
    ) -> None:
        self._node_id = node_id
        self._peers = peers
        self._here = here

    async def call(self, broker: int, message: Any, timeout_s: float) -> Any:
        """The response.  Errors as those of `Peers.call`."""
        version = _VERSIONS.get(message.API_KEY, p.version_range(message)[1])
        if broker != self._node_id:
            return await self._peers.call(broker, message, timeout_s=timeout_s, version=version)
        frame = memoryview(bytes(p.encode_request(message, version, 0, "kdirect-broker")))[4:]
        header = p.parse_request_header(frame)
        answer = self._here(message.API_KEY)(None, header, p.decode_request(header, frame))
        if answer.awaited is not None:
            answer = await answer.awaited
        body = b"".join(bytes(buffer) for buffer in answer.buffers or ())
        head = p.response_header(p.APIS[message.API_KEY], version, 0)
        return p.decode_response(message.API_KEY, version, head + body)[1]

    async def log_start(self, leader: int, tp: TopicPartition, epoch: int) -> int:
        """Where the whole log of the leader of `epoch` starts.  KdirectError."""
        row = {"partition_index": tp.partition, "current_leader_epoch": epoch,
               "timestamp": EARLIEST_OFFSET}  # fmt: skip
        request = build(
            p.ListOffsetsRequest,
            replica_id=-1,
            isolation_level=0,
            topics=[{"name": tp.topic, "partitions": [row]}],
            timeout_ms=int(CALL_S * 1000),
        )
        found = _only(await self.call(leader, request, CALL_S), leader, tp)
        return int(found.offset)

    async def leader_epochs(
        self, leader: int, tp: TopicPartition, epoch: int, start: int, end: int
    ) -> tuple[tuple[int, int], ...]:
        """(leader epoch, first offset) of the log of the leader of `epoch`, from `start` to `end`,
        ascending.  KdirectError."""
        found: dict[int, int] = {}  # first offset -> the newest epoch that begins there
        asked, _ = await self._epoch_end(leader, tp, epoch, epoch)
        while asked >= 0:
            # Where the epochs below it end, it begins.
            below, begins = (-1, -1)
            if asked > 0:
                below, begins = await self._epoch_end(leader, tp, epoch, asked - 1)
            if begins < end:
                found.setdefault(max(begins, start), asked)
            if begins <= start:
                break
            asked = below
        return tuple((found[first], first) for first in sorted(found))

    async def _epoch_end(
        self, leader: int, tp: TopicPartition, current: int, asked: int
    ) -> tuple[int, int]:
        row = {"partition": tp.partition, "current_leader_epoch": current, "leader_epoch": asked}
        request = build(
            p.OffsetForLeaderEpochRequest,
            replica_id=-1,
            topics=[{"topic": tp.topic, "partitions": [row]}],
        )
        found = _only(await self.call(leader, request, CALL_S), leader, tp)
        return int(found.leader_epoch), int(found.end_offset)


def _only(response: Any, leader: int, tp: TopicPartition) -> Any:
    """The only row of a response."""
    (topic,) = response.topics
    (row,) = topic.partitions
    if row.error_code != 0:
        error: KdirectError = BrokerUnavailableError(
            f"broker {leader} answers {error_kind(row.error_code).name} about {tp}",
            hint="it is asked again",
        )
        raise error
    return row


__all__ = ["MetadataCalls"]
