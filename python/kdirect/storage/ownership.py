"""Whose the objects of a cluster are, where two might think they are theirs.

A log directory that was copied together with its cluster id, or an id that was given twice, makes
two brokers (or clusters) that write below the same keys.  Nothing forbids it: an object store has
neither locks nor sessions.  So each start says in the store that it is the owner, and whoever finds
that another one has said so since copies and deletes nothing any more.

- **A marker** is an object ``CLUSTER/owners/[SCOPE/]NUMBER-INCARNATION``: written once, never
  changed, like all objects here.  The one of the highest number counts, of two with one number the
  one whose incarnation is the greater text, so all who look come to the same result.
- **An incarnation** is one start of a broker that is alone, or one leadership of partition 0 of
  ``__remote_log_metadata`` in a cluster; its id is random.  The incarnations that an owner has been
  are kept where its metadata is (`Keeper`): in the log directories, or in the metadata store.  A
  copy of the directories knows those before it was copied, and none of those that began since.
- **Taking**: who starts takes over from an incarnation that it has been itself, or from nobody.
  From another one it does not, unless it is told to (`replaces`).  Its own incarnation is kept
  before its marker is put, so a crash between the two changes nothing.
- **Looking** is one LIST of a folder with a marker or two, no more often than its callers say.

Law: it decides about the right to copy and delete, and deletes nothing but older markers.  What
may be lost in the time between two looks is docs/tiered-storage.md's to say; that time takes no
object that only the other one knows, because a broker deletes nothing but what its own metadata
names (`kdirect.storage.sweep`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kdirect.errors import ClosedError, KdirectError, NotOwnerError
from kdirect.format.ids import encode_id
from kdirect.log.checkpoint import replace_file
from kdirect.objects.store import ObjectStore

log = logging.getLogger("kdirect.storage")

FOLDER = "owners"
TAKE_OVER = "remote.log.storage.take.over"
OWN_FILE = "remote-owner.json"
MOST_KEPT = 16  # incarnations
MOST_BYTES = 4096  # of a marker
LOST_FOR_S = 30.0  # then it is looked again whether the other one is still named


class Marker(NamedTuple):
    """What a key says."""

    number: int
    incarnation: str
    key: str


class Keeper(Protocol):
    """Where an owner keeps the incarnations that it has been.  Both may wait, on any thread, and
    raise KdirectError."""

    def knows(self, incarnation: str) -> bool: ...

    def remember(self, incarnations: Sequence[str]) -> None:
        """Keep these, too, durably."""


class FileKeeper:
    """In each log directory, so that it is with the metadata wherever that is."""

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories = list(directories)

    def knows(self, incarnation: str) -> bool:
        return incarnation in self._read()

    def _read(self) -> list[str]:
        found: dict[str, None] = {}
        for directory in self._directories:
            try:
                document = json.loads((directory / OWN_FILE).read_bytes())
                found.update(dict.fromkeys(str(x) for x in document["incarnations"]))
            except (OSError, ValueError, TypeError, KeyError):
                continue  # another directory has it, or the operator has to say who owns
        return list(found)

    def remember(self, incarnations: Sequence[str]) -> None:
        before = [x for x in self._read() if x not in incarnations]
        # What is told now stays longest: the present owner may be the one known longest.
        kept = list(dict.fromkeys([*before, *incarnations]))[-MOST_KEPT:]
        data = json.dumps({"version": 1, "incarnations": kept}).encode()
        failed: list[OSError] = []
        for directory in self._directories:
            try:
                replace_file(directory / OWN_FILE, data)
            except OSError as e:
                failed.append(e)
        if len(failed) == len(self._directories):
            raise failed[0]


class Ownership:
    """See the module.  `address`: where the owner is reached, for the error that others get.
    `scope`: names the one among several that share a cluster id by agreement.  `replaces`: an
    incarnation of somebody else from which may be taken over.  `begins`: one begins now.  Any
    thread."""

    def __init__(
        self,
        store: ObjectStore,
        cluster_id: str,
        keeper: Keeper,
        *,
        address: Callable[[], str],
        scope: str = "",
        replaces: str = "",
        begins: bool = True,
    ) -> None:
        self._store = store
        self._cluster_id = cluster_id
        self._folder = f"{cluster_id}/{FOLDER}/{scope}"
        self._keeper = keeper
        self._address = address
        self._replaces = replaces
        self._lock = threading.Lock()
        self._incarnation = _new_incarnation()
        self._begins = begins  # this incarnation has not said yet that it is the owner
        self._another = threading.Event()  # incarnation is to begin
        self._looked_at: float | None = None  # when it was the owner
        self._lost: NotOwnerError | None = None
        self._lost_at = 0.0
        self._serves = threading.Event()
        self._closed = False

    @property
    def is_lost(self) -> bool:
        """Was somebody else the owner when it was looked last?"""
        return self._lost is not None

    def serve(self) -> None:
        """The broker serves: until now whoever asks has waited, for one that fails to start must
        take nothing from the one that runs."""
        self._serves.set()

    def close(self) -> None:
        """Let nobody wait."""
        self._closed = True
        self._serves.set()

    def begin(self) -> None:
        """Another incarnation begins: it says so at the next `require`.  Waits for nobody: who
        looks just now holds the lock, and its keeper may need the caller's event loop."""
        self._another.set()

    def require(self, within_s: float) -> None:
        """Return if this is the owner, as was seen no longer than `within_s` ago.  NotOwnerError;
        errors of the store: nothing is known, so nothing may be done."""
        self._serves.wait()
        with self._lock:
            if self._closed:
                raise ClosedError("the broker is stopping")
            if self._another.is_set():
                self._another.clear()
                self._incarnation = _new_incarnation()
                self._begins, self._looked_at = True, None
            now = time.monotonic()
            if self._lost is not None and now < self._lost_at + LOST_FOR_S:
                raise self._lost
            if self._looked_at is not None and now <= self._looked_at + within_s:
                return
            self._look()
            self._looked_at = now
            if self._lost is not None:
                log.warning("%s is this broker's again", self._store.uri)
                self._lost = None

    def _look(self) -> None:
        newest = newest_marker(self._store, self._folder)
        self._require_own(newest)
        if newest is not None and not self._begins:
            return
        known = () if newest is None else (newest.incarnation,)
        self._keeper.remember([*known, self._incarnation])
        number = 1 if newest is None else newest.number + 1
        mine = self._put(number)
        there = markers(self._store, self._folder)
        self._require_own(max(there, default=None))
        self._begins = False
        with contextlib.suppress(KdirectError):  # who may not delete is the owner all the same
            for marker in there:
                if marker < mine:
                    self._store.delete(marker.key)

    def _require_own(self, newest: Marker | None) -> None:
        if newest is None or newest.incarnation == self._replaces:
            return
        if self._keeper.knows(newest.incarnation):
            return
        error = self._not_owner(newest)
        if self._lost is None or self._lost.message != error.message:
            log.error("%s", error)
        self._lost, self._lost_at, self._looked_at = error, time.monotonic(), None
        raise error

    def _put(self, number: int) -> Marker:
        key = f"{self._folder}{number:020}-{self._incarnation}"
        document = {
            "version": 1,
            "address": self._address(),
            "since_ms": time.time_ns() // 1_000_000,
        }
        data = json.dumps(document).encode()
        self._store.put(key, len(data), [data])
        return Marker(number, self._incarnation, key)

    def _not_owner(self, newest: Marker) -> NotOwnerError:
        return NotOwnerError(
            f"the objects of cluster {self._cluster_id} in {self._store.uri} belong to"
            f" {described(self._store, newest)}: nothing is copied or deleted by this broker",
            hint="if that is a copy of this one's log directories, stop it; two brokers need"
            " cluster ids, or places in the store, of their own; if that one is gone for good,"
            f" start this one with {TAKE_OVER}={newest.incarnation}",
        )


def take_by_force(store: ObjectStore, cluster_id: str, address: str) -> list[str]:
    """Take the objects of a cluster over from whoever has them; the incarnations that who does so
    has been.  Errors of the store."""
    newest = newest_marker(store, f"{cluster_id}/{FOLDER}/")
    keeper = _Memory([] if newest is None else [newest.incarnation])
    ownership = Ownership(store, cluster_id, keeper, address=lambda: address)
    ownership.serve()
    ownership.require(0)
    return keeper.incarnations


class _Memory:
    def __init__(self, incarnations: list[str]) -> None:
        self.incarnations = incarnations

    def knows(self, incarnation: str) -> bool:
        return incarnation in self.incarnations

    def remember(self, incarnations: Sequence[str]) -> None:
        self.incarnations = list(dict.fromkeys([*self.incarnations, *incarnations]))


def markers(store: ObjectStore, folder: str) -> list[Marker]:
    """Those in a folder, the one that counts last."""
    found = []
    for info in store.list(folder):
        number, dash, incarnation = info.key[len(folder) :].partition("-")
        if dash and number.isdecimal() and incarnation and "/" not in incarnation:
            found.append(Marker(int(number), incarnation, info.key))
    return sorted(found)


def newest_marker(store: ObjectStore, folder: str) -> Marker | None:
    """The one that counts."""
    return max(markers(store, folder), default=None)


def owner_address(store: ObjectStore, marker: Marker) -> str:
    """What the owner says of where it is; empty when that cannot be read."""
    try:
        size = store.size(marker.key) or 0
        document = json.loads(bytes(store.get(marker.key, 0, min(size, MOST_BYTES))))
        return str(document["address"])
    except (KdirectError, ValueError, TypeError, KeyError):
        return ""


def described(store: ObjectStore, marker: Marker) -> str:
    """An owner in words."""
    where = owner_address(store, marker) or "an unknown address"
    return f"another broker, at {where} (incarnation {marker.incarnation})"


def _new_incarnation() -> str:
    while (found := encode_id(uuid.uuid4())).startswith("-"):
        pass  # `--owner` could not take it from a command line
    return found


__all__ = ["FileKeeper", "Keeper", "Ownership", "take_by_force"]
