"""Objects that nobody owns: uploads whose broker died, or that were given up and ended after all.

**By itself a broker deletes only what it has given up.**  A record of the metadata precedes every
upload, so a broker knows each try of its own, and remembers those that came to nothing for as long
as their objects may still turn up (`PartitionMetadata.given_up`).  That the metadata does not know
an object proves nothing: the metadata may be an older copy, or that of a broker that was cloned,
and the object another one's.

**By hand** (`Sweep`, for ``kdirect remote sweep``) whatever the metadata does not know may go.  A
key says which cluster, topic and partition an object belongs to, and which try to copy it was.  An
object is an orphan if it is of this cluster, of a topic that this cluster knows or has deleted, of
a try that the metadata does not know, and older than ``remote.orphan.age.ms``: a younger one may be
an upload whose metadata is on its way.  Everything else is left alone: objects of other clusters,
of topics that this cluster has never heard of, and what is no object of kdirect at all.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from kdirect.format.remote_metadata import RemoteSegment
from kdirect.format.segment_object import SegmentIdentity, parse_key
from kdirect.objects.store import ObjectInfo, ObjectStore
from kdirect.storage.upload import key_of

# Tries that came to nothing are remembered for so long at least.
REMEMBER_LEAST_MS = 3_600_000


def delete_given_up(
    store: ObjectStore, cluster_id: str, given_up: Iterable[RemoteSegment]
) -> Iterator[str]:
    """Delete the objects of tries that came to nothing, where one has turned up; their keys.
    Errors of the store."""
    for segment in given_up:
        key = key_of(segment, cluster_id)
        if store.size(key) is not None:
            store.delete(key)
            yield key


class Orphan(NamedTuple):
    """An object that nobody owns."""

    key: str
    size: int
    modified_ms: int
    identity: SegmentIdentity


class Known(NamedTuple):
    """What the metadata knows: topics, and segments that are there, come or go."""

    cluster_id: str
    topics: Collection[uuid.UUID]
    segments: Collection[uuid.UUID]


def orphans(
    objects: Iterable[ObjectInfo], known: Known, now_ms: int, age_ms: int
) -> Iterator[Orphan]:
    """Those of the objects that are orphans.  An object whose age the store does not tell is
    none."""
    for found in objects:
        parsed = parse_key("", found.key)
        if parsed is None:
            continue
        identity, _ = parsed
        if identity.cluster_id != known.cluster_id or identity.topic_id not in known.topics:
            continue
        if identity.segment_id in known.segments or found.modified_ms < 0:
            continue
        if now_ms - found.modified_ms > age_ms:
            yield Orphan(found.key, found.size, found.modified_ms, identity)


class Sweep(NamedTuple):
    """One pass over the objects of a cluster."""

    store: ObjectStore
    known: Known
    now_ms: int
    age_ms: int

    def find(self) -> list[Orphan]:
        """What would be deleted.  Lists the cluster's objects; errors of the store."""
        listed = self.store.list(f"{self.known.cluster_id}/")
        return list(orphans(listed, self.known, self.now_ms, self.age_ms))

    def delete(
        self, found: Iterable[Orphan], still_unknown: Callable[[uuid.UUID], bool]
    ) -> list[Orphan]:
        """Delete those that the metadata still does not know; which."""
        deleted = []
        for orphan in found:
            if still_unknown(orphan.identity.segment_id):
                self.store.delete(orphan.key)
                deleted.append(orphan)
        return deleted


__all__ = ["Known", "Orphan", "Sweep", "delete_given_up", "orphans"]
