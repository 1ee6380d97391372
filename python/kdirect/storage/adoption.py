"""Whether an object is whole whose upload another leadership had begun."""

from __future__ import annotations

from kdirect.format.remote_metadata import RemoteSegment
from kdirect.format.segment_object import TailPlace, needs, parse_footer, require_identity
from kdirect.objects.store import ObjectStore
from kdirect.storage.upload import identity_of, key_of

TAIL_GUESS_BYTES = 64 << 10


def find_whole(store: ObjectStore, segment: RemoteSegment, cluster_id: str) -> TailPlace | None:
    """Where the tail of the object of `segment` is; None: there is none, or it is not the one that
    the metadata tells of.  CorruptObjectError, UnsupportedFormatError; errors of the store."""
    key = key_of(segment, cluster_id)
    size = store.size(key)
    if size is None:
        return None
    tail = store.get_tail(key, size, min(size, TAIL_GUESS_BYTES))
    wanted = needs(tail, size)
    if wanted > len(tail):
        tail = store.get_tail(key, size, wanted)
    footer = parse_footer(tail, size)
    require_identity(footer, identity_of(segment, cluster_id), segment.base_offset)
    is_it = footer.end_offset == segment.end_offset and footer.log_bytes == segment.size
    return footer.tail if is_it else None


__all__ = ["find_whole"]
