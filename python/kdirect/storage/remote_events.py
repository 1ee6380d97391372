"""What a `RemoteLog` is told, and what it has done: its events and effects.  Values only."""

from __future__ import annotations

import enum
import uuid
from typing import NamedTuple, TypeAlias

from kdirect.format.remote_metadata import RemoteSegment
from kdirect.format.segment_object import TailPlace
from kdirect.storage.copy_rules import LocalLog, TierConfig
from kdirect.storage.segment_states import Record

# -- events ----------------------------------------------------------------------------------------


class Found(enum.Enum):
    """What is at the key of a segment."""

    SOUND = "the whole object that the metadata tells of"
    UNSOUND = "nothing, a part, or something damaged"
    UNKNOWN = "the store did not answer"


class Recorded(NamedTuple):
    record: Record


class Unrecorded(NamedTuple):
    record: Record


class Loaded(NamedTuple):
    """See the table."""


class Looked(NamedTuple):
    now_ms: int
    local: LocalLog
    config: TierConfig


class PutEnded(NamedTuple):
    """`tail`: of the object that is stored; None: it is not there, or nobody knows."""

    segment_id: uuid.UUID
    tail: TailPlace | None


class Checked(NamedTuple):
    """`tail` of a sound object."""

    segment_id: uuid.UUID
    found: Found
    tail: TailPlace | None = None


class DeleteEnded(NamedTuple):
    segment_id: uuid.UUID
    done: bool


class LogStartMoved(NamedTuple):
    offset: int


class TopicDeleted(NamedTuple):
    """See the table."""


Event: TypeAlias = (
    Recorded | Unrecorded | Loaded | Looked | PutEnded | Checked | DeleteEnded | LogStartMoved
    | TopicDeleted
)  # fmt: skip


# -- effects ---------------------------------------------------------------------------------------


class Write(NamedTuple):
    """Append the record to the metadata topic; answer with `Recorded` or `Unrecorded`."""

    record: Record


class Put(NamedTuple):
    """Upload the local segment that begins at the base offset of `segment`; `PutEnded`."""

    segment: RemoteSegment


class Check(NamedTuple):
    """Look at the object of `segment`; `Checked`."""

    segment: RemoteSegment


class Delete(NamedTuple):
    """Delete the object of `segment`; absent is as good as deleted; `DeleteEnded`."""

    segment: RemoteSegment


class MoveLogStart(NamedTuple):
    """Have the log begin at `offset`, durably; `LogStartMoved`, or nothing when it fails: the next
    `Looked` asks again."""

    offset: int


class Tiered(NamedTuple):
    """Local segments that end at `end_offset` or below may go, and no others; -1: none."""

    end_offset: int


class LookAgain(NamedTuple):
    """There may be more to copy or to delete: send `Looked` soon."""


class Forget(NamedTuple):
    """Nothing is left of a deleted topic's partition."""


Effect: TypeAlias = Write | Put | Check | Delete | MoveLogStart | Tiered | LookAgain | Forget


# -- figures ---------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """What metrics tell of one partition: bytes and segments that are sealed and not copied, those
    whose deletion is not finished, segments with metadata, bytes of log in the store."""

    copy_lag_bytes: int
    copy_lag_segments: int
    delete_lag_bytes: int
    delete_lag_segments: int
    metadata_count: int
    remote_bytes: int
