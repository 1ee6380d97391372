"""Blocks of producer ids, of which no two brokers get one (Kafka's `ProducerIdManager`).

The node ``/latest_producer_id_block`` names the block that was given last.  Whoever needs one
replaces it on condition of its version, so of several that try one wins, and the others read again.
A write whose outcome is unknown may have happened: its block is given up, never used.
"""

from __future__ import annotations

from typing import NamedTuple

from kdirect.cluster import paths, records
from kdirect.cluster.fields import MOST_INT64
from kdirect.cluster.records import ProducerIdBlock
from kdirect.errors import ConfigError, LogError, StoreLostError
from kdirect.member.loop_store import LoopStore
from kdirect.store.contract import Committed, Conflict, Create, Found, Operation, Reason, Replace

BLOCK_IDS = 1000  # Kafka's


class Block(NamedTuple):
    """The ids from `first` to below `limit`."""

    first: int
    limit: int


async def take_block(store: LoopStore, broker: int, least: int = 0) -> Block:
    """A block of ids from `least` on that nobody else has.  StoreLostError: it is not known which;
    ask again when the store answers.  CorruptMetadataError: the node is damaged; ConfigError: the
    store refuses; LogError: there are no more ids."""
    path = paths.PRODUCER_ID_BLOCK
    while True:
        found = await store.read_later(path)
        if isinstance(found, Conflict):
            raise _refused(found)
        if not isinstance(found, Found):
            raise StoreLostError("the metadata store was lost")
        (node,) = found.nodes
        last = -1 if node is None else records.decode_producer_ids(path, node.value).last
        first = max(last + 1, least)
        if first > MOST_INT64 - BLOCK_IDS:
            raise LogError("all producer ids of the cluster are used up", hint="use a new cluster")
        block = ProducerIdBlock(broker, first, first + BLOCK_IDS - 1)
        value = records.encode_producer_ids(block)
        write: Operation
        write = Create(path, value) if node is None else Replace(path, value, node.version)
        answer = await store.commit_later(write)
        if isinstance(answer, Committed):
            return Block(first, first + BLOCK_IDS)
        if not isinstance(answer, Conflict):
            raise StoreLostError("the metadata store was lost")
        if answer.reason is Reason.REFUSED:
            raise _refused(answer)


def _refused(conflict: Conflict) -> ConfigError:
    why = conflict.detail or conflict.reason.value
    return ConfigError(
        f"the metadata store gives no producer ids at {paths.PRODUCER_ID_BLOCK}: {why}",
        hint="let this broker read and write there",
    )
