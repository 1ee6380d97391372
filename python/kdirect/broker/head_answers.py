"""What a request for a partition's head brings along, and why it is refused.

What may not enter: who is refused (`kdirect.broker.head_life`).
"""

from __future__ import annotations

from typing import Any

from kdirect.broker.appends import PendingAppend
from kdirect.broker.grants import Peer
from kdirect.broker.head_access import HeadAccess
from kdirect.broker.head_life import Effect, HeadLife
from kdirect.errors import RefusedError
from kdirect.format import layout
from kdirect.format.error_codes import ErrorCode
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment

REFUSALS = tuple(effect for effect in Effect if effect.name.startswith("REFUSE_"))


class Occasion:
    """What an event brings along for its effects.  `answer` stays None where the request waits."""

    __slots__ = (
        "answer",
        "end_order",
        "error",
        "item",
        "min_bytes",
        "partition",
        "peer",
        "request",
        "segment",
        "why",
    )

    def __init__(self, partition: Partition, *, min_bytes: int = 0, why: str = "") -> None:
        self.partition = partition
        self.min_bytes = min_bytes  # room that will be asked for
        self.why = why  # for the log
        self.peer: Peer | None = None
        self.request: Any = None
        self.segment: Segment | None = None  # the head, where it has the room
        self.end_order: int | None = None  # of the first reservation that passed the head's end
        self.item: PendingAppend | None = None  # of a Kafka client
        self.error: BaseException | None = None  # why the next file could not be made
        self.answer: Any = None


def refusal(
    effect: Effect, life: HeadLife, occasion: Occasion, access: HeadAccess | None, now: float
) -> RefusedError:
    """The answer to a request that this effect refuses; `access` is the present head's."""
    tp = occasion.partition.topic_partition
    match effect:
        case Effect.REFUSE_HELD:
            grants = access.members.values() if access is not None else ()
            holder = next((g.peer.client for g in grants), "?")
            return RefusedError(
                layout.ERROR_ACCESS_HELD,
                f"{tp} is written by another RDMA producer ({holder}), and one of the two wants it"
                " alone; retry later or use TCP",
            )
        case Effect.REFUSE_ELSEWHERE:
            assert occasion.peer is not None and access is not None
            return _contended(
                f"{tp} is written over {access.engine.transport}, not"
                f" {occasion.peer.engine.transport}; use TCP"
            )
        case Effect.REFUSE_HELD_OFF:
            alone = occasion.request.mode == layout.PRODUCE_EXCLUSIVE
            held_off = life.held_off(alone, now)
            why, seconds = held_off if held_off is not None else (None, 0.0)
            return _contended(
                f"{tp} is not granted now:"
                f" {why.value if why is not None else 'it was refused before'};"
                f" retry in {seconds:.1f} s or use TCP"
            )
        case Effect.REFUSE_WANTED:
            return _contended(f"others write {tp}, too: ask again when this head is full")
        case Effect.REFUSE_GROWING:
            return _contended(f"the head of {tp} grows: ask again when this one is full")
        case Effect.REFUSE_TWICE:
            return RefusedError(
                ErrorCode.INVALID_REQUEST, f"the file after the head of {tp} is granted already"
            )
        case _:
            assert effect is Effect.REFUSE_NOT_LED
            return RefusedError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"this broker does not lead {tp}; ask for metadata",
            )


def _contended(text: str) -> RefusedError:
    return RefusedError(layout.ERROR_ACCESS_CONTENDED, text)
