"""Records of remote storage, fetched from the object store past the broker.

Owns: for each partition that is read so, the objects that hold what comes next, the GETs under way,
and what follows when one fails.  A partition is here from an offset on that its leader has located
(LocateRecords, once for many objects) up to the first one that the broker has itself; there it has
no path any more, and whoever reads it enters it again (`read_paths`), by READs or Fetch.

Invariants:

- Records come in the order of their offsets, each once, none is left out: the next object begins
  where the one before ended, and whatever goes wrong, reading goes on at the cursor's next offset.
- An object that is gone is looked up again; so is a signed URL that the store refuses, which may
  have expired.  If the answer names the same object again, the error counts.
- GETs under way and bytes that wait to be taken stay within ``cold.buffer.bytes``, for all
  partitions together, but for one piece of each; within half of it while the store is quick, as
  more would only push each other out of the processor's caches.  With more partitions pieces are
  smaller.  Objects ahead are opened while the one before is read.

One thread at a time; the GETs are made by threads of their own (`Environment.spawn`).
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn, Protocol

from kdirect.client.cold_object import ColdObject
from kdirect.client.cold_places import ColdPlace, ColdView, Wanted, locate
from kdirect.client.cold_stores import ColdStores
from kdirect.client.cursor import TcpCursor
from kdirect.client.lost_broker import LOST, has_moved
from kdirect.errors import (
    AccessDeniedError,
    ConfigError,
    KdirectError,
    ObjectNotFoundError,
    OffsetOutOfRangeError,
    ProtocolError,
    RemoteAccessError,
    RemoteStorageError,
    UnknownTopicError,
)
from kdirect.format import layout
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.cluster import Cluster
from kdirect.wire.environment import Environment

LEAST_PIECE, MOST_PIECE = 64 << 10, 4 << 20
LEAST_SHARE = 512 << 10  # to which pieces shrink for the sake of other partitions
PIECES = 4  # of the buffer, under way together while there is one partition
QUICK_S = 0.001  # that the GET of a piece takes where the bytes are in this host's memory, or near
OPEN_AHEAD = 16  # objects; small ones come whole when they are opened
NO_STOP = 2**63 - 1


class ColdConnections(Protocol):
    """What reading objects needs of a session."""

    @property
    def cluster(self) -> Cluster:
        """Who leads what, and connections."""

    @property
    def cold_stores(self) -> ColdStores | None:
        """The object stores; None where nothing is read past the broker."""


class ColdCursor(TcpCursor):
    """Takes the records of a partition from objects; otherwise as its base."""


class _Opened:
    """One object that is read: its opening, then pieces."""

    def __init__(self, cold: ColdObject, opening: Attempt[None]) -> None:
        self.cold = cold
        self.opening = opening
        self.is_open = False  # the opening was looked at
        self.held = cold.opening_bytes  # by what the opening brings
        self.started = False  # all pieces are under way, or at hand
        self.under_way: deque[tuple[Attempt[memoryview], int]] = deque()
        self._next_piece: tuple[int, int] | None = None

    def peek(self) -> tuple[int, int] | None:
        """The next piece that is to be fetched."""
        if self._next_piece is None:
            self._next_piece = next(self.cold.pieces, None)
            self.started = self._next_piece is None
        return self._next_piece

    def pop(self) -> None:
        self._next_piece = None


class _Log:
    """One partition."""

    def __init__(self, cursor: ColdCursor, view: ColdView, stop: int) -> None:
        self.cursor = cursor
        self.stop = stop
        self.places = deque(view.places)  # not opened yet
        self.located_to = view.places[-1].end_offset
        self.opened: deque[_Opened] = deque()
        # The object and the offset that were looked up again: there an error counts now.
        self.renewed: tuple[uuid.UUID, int] | None = None


class ColdReads:
    """See the module.  `stop`: no record is wanted from there on; `patience_ms`: how long a broker
    may take to say where records are, as others are read meanwhile.  A source of cursors, as
    `kdirect.client.read_paths.TcpSource` describes them."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Mapping[str, Any],
        stores: ColdStores,
        environment: Environment,
        *,
        stop: int = NO_STOP,
        patience_ms: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._patience_ms = patience_ms
        self._stores = stores
        self._environment = environment
        self._stop = stop
        self._max_batch_bytes: int = settings["max.batch.bytes"]
        self._buffer_bytes: int = settings["cold.buffer.bytes"]
        self._logs: dict[TopicPartition, _Log] = {}
        self._hot: dict[TopicPartition, int] = {}  # left because the broker has it from here on
        self._under_way = 0  # bytes asked for and not taken
        self._get_s = 0.0  # that GETs take, the last ones counting most
        self._lock = threading.Lock()  # of the counters
        self._gets = self._bytes = self._lookups = 0
        self._waited_s = 0.0

    # -- which partitions --------------------------------------------------------------------------

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._logs

    @property
    def comes_first(self) -> bool:
        """Is the store asked before the broker, for what both have?"""
        return self._stores.prefers_cold

    def is_located(self, tp: TopicPartition, offset: int) -> bool:
        """Is it known where the record is, without asking the broker?"""
        return self._stores.is_used and bool(self._stores.known(tp, offset))

    def enter(
        self, offsets: Mapping[TopicPartition, int], known: Collection[TopicPartition] = ()
    ) -> dict[TopicPartition, KdirectError]:
        """Read those of these that are in objects which may be read; the others are not here then.
        Of the others, those that are refused, as with ``cold.reads=direct`` there is no other way.
        Of those of `known` the broker has said just now that they are cold."""
        self.release(offsets)
        refused: dict[TopicPartition, KdirectError] = {}
        stores = self._stores
        wanted = {
            tp: offset
            for tp, offset in offsets.items()
            if (0 <= offset < self._hot.pop(tp, NO_STOP) or tp in known)
            and not stores.is_refused(tp.topic)
        }
        if not stores.is_used:
            wanted = {}
        for tp, view in self._locate(wanted).items():
            offset = offsets[tp]
            if view.places:
                cursor = ColdCursor(tp, offset, self, max_batch_bytes=self._max_batch_bytes)
                self._logs[tp] = _Log(cursor, view, self._stop)
            elif view.error is not None and not _is_of_the_log(view.error):
                error = self._denied(tp, offset, view, view.error)
                if error is not None:
                    refused[tp] = error
        return refused

    def _denied(
        self, tp: TopicPartition, offset: int, view: ColdView, why: KdirectError
    ) -> KdirectError | None:
        """There are no places, because of `why`.  The error, where there is no other way."""
        forged = isinstance(why, ProtocolError)
        if self._stores.mode == "direct":
            if forged:
                return why
            if offset < view.local_start:
                return RemoteAccessError(
                    f"offset {offset} of {tp} is in remote storage only, and its broker does not"
                    f" let it be read from there: {why.message}",
                    hint="set cold.reads=auto, or remote.log.client.access of the broker",
                )
        elif forged:
            self._stores.give_up(why)
        elif view.local_start >= 0:
            self._stores.refuse(tp.topic)
        return None

    def _locate(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, ColdView]:
        known = {tp: self._stores.known(tp, offset) for tp, offset in offsets.items()}
        for places in known.values():
            # Whoever was told these uses them once: a topic may be deleted, and made again.
            for place in places:
                self._stores.forget(place)
        out = {
            tp: ColdView(places, places[-1].end_offset) for tp, places in known.items() if places
        }
        return out | self._ask({tp: x for tp, x in offsets.items() if tp not in out})

    def _ask(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, ColdView]:
        """What the broker says."""
        if not offsets:
            return {}
        if self._stop == NO_STOP:
            stop = layout.TO_TIERED_END if self.comes_first else layout.TO_LOCAL_LOG_START
        else:
            stop = self._stop
        wanted = [Wanted(tp, offset, stop) for tp, offset in offsets.items()]
        found, requests = locate(self._cluster, wanted, self._patience_ms)
        self._lookups += requests
        if self.comes_first:
            return found
        return {tp: _only_cold(view) for tp, view in found.items()}

    def cursor(self, tp: TopicPartition) -> ColdCursor | None:
        found = self._logs.get(tp)
        return found.cursor if found is not None else None

    def follow(self, tp: TopicPartition, epoch: int) -> None:
        """Before what is read of `tp`, which was just entered, is a batch of this leader epoch."""
        self._logs[tp].cursor.follow(epoch)

    def release(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading these, as far as they are read."""
        for tp in tps:
            found = self._logs.pop(tp, None)
            if found is not None:
                self._drop(found)

    def _drop(self, found: _Log) -> None:
        """Forget what is under way; whoever fetches it ends by itself."""
        for opened in found.opened:
            self._under_way -= opened.held + sum(length for _, length in opened.under_way)
        found.opened.clear()
        found.places.clear()

    def close(self) -> None:
        self.release(list(self._logs))

    # -- bytes -------------------------------------------------------------------------------------

    def bring(self, cursor: TcpCursor, wait_ms: float) -> bool:
        """See `TcpCursor`.  AccessDeniedError where the partition is to be entered again: it is hot
        from here on, or, with ``cold.reads=auto``, its store cannot be read."""
        found = self._logs.get(cursor.tp)
        if found is None or found.cursor is not cursor:
            return False
        deadline = self._environment.monotonic() + wait_ms / 1000
        while True:
            self._fill(found)
            if not found.opened:
                self._go_on(found)
                continue
            opened = found.opened[0]
            try:
                if not self._wait(_head(opened), deadline):
                    return False
                if self._hand_on(found, opened):
                    self._fill(found)  # what was taken makes room while it is decoded
                    return True
            except ObjectNotFoundError as e:
                self._look_again(found, opened.cold.place, e)
            except RemoteAccessError as e:
                if opened.cold.place.url is None:
                    self._failed(found, e)
                self._look_again(found, opened.cold.place, e)
            except (RemoteStorageError, ConfigError) as e:
                self._failed(found, e)

    def consumed(self, cursor: TcpCursor, n: int) -> None:
        """See `TcpCursor`."""

    def _hand_on(self, found: _Log, opened: _Opened) -> bool:
        """Give the cursor what is at hand of the first object; False: nothing, or it was the
        last."""
        cold = opened.cold
        if not opened.is_open:
            opened.opening.result()
            self._look_at_opening(opened)
            return False
        if cold.at_hand is not None:
            data, cold.at_hand = cold.at_hand, None
            self._free(opened)
        elif opened.under_way:
            attempt, length = opened.under_way[0]
            data = attempt.result()
            opened.under_way.popleft()
            self._under_way -= length
        else:
            cold.end()
            found.opened.popleft()
            return False
        whole, epoch = cold.take(data)
        found.cursor.where = cold.name
        found.cursor.arrived(whole, epoch)
        return len(whole) > 0

    def _free(self, opened: _Opened) -> None:
        self._under_way -= opened.held
        opened.held = 0

    def _wait(self, attempt: Attempt[Any] | None, deadline: float) -> bool:
        if attempt is None or attempt.done:
            return True
        now = self._environment.monotonic
        began = now()
        attempt.wait(max(deadline - began, 0.0))
        self._waited_s += now() - began
        return attempt.done

    # -- what is under way -------------------------------------------------------------------------

    def _fill(self, found: _Log) -> None:
        """Have GETs under way for what comes next, as far as there is room."""
        for opened in found.opened:
            if not opened.is_open and not (opened.opening.done and self._look_at_opening(opened)):
                break  # if it has failed: its error comes when it is its turn
            while (piece := opened.peek()) is not None:
                is_next = opened is found.opened[0] and not opened.under_way
                if not is_next and not self._has_room(piece[1]):
                    return
                opened.pop()
                opened.under_way.append((self._get(opened.cold.place, *piece), piece[1]))
                self._under_way += piece[1]
        while found.places and len(found.opened) < OPEN_AHEAD:
            # One object is opened while the one before is fetched; more, if they are small.
            if sum(not x.started and not x.cold.is_taken_whole for x in found.opened) > 1:
                return
            cold = self._object(found, found.places[0])
            if found.opened and not self._has_room(cold.opening_bytes):
                return
            found.places.popleft()
            opened = _Opened(cold, self._open(cold))
            self._under_way += opened.held
            found.opened.append(opened)

    def _look_at_opening(self, opened: _Opened) -> bool:
        """Its opening is done.  False: it failed."""
        try:
            opened.opening.result()
        except Exception:
            return False
        opened.is_open = True
        if opened.cold.at_hand is None:
            self._free(opened)
        return True

    def _piece_bytes(self) -> int:
        """Of an object that is opened now: a power of two, as blocks of memory are."""
        alone = self._buffer_bytes // PIECES
        shared = max(alone // max(1, len(self._logs)), min(alone, LEAST_SHARE))
        wanted = min(max(shared, LEAST_PIECE), MOST_PIECE)
        return 1 << (wanted.bit_length() - 1)

    def _has_room(self, length: int) -> bool:
        allowed = self._buffer_bytes // (2 if self._get_s < QUICK_S else 1)
        return self._under_way + length <= allowed

    def _object(self, found: _Log, place: ColdPlace) -> ColdObject:
        return ColdObject(
            place,
            found.stop,
            self._stores.name(place),
            piece_bytes=self._piece_bytes(),
            max_batch_bytes=self._max_batch_bytes,
        )

    def _open(self, cold: ColdObject) -> Attempt[None]:
        get = self._getter(cold.place)
        return self._environment.spawn(lambda: cold.open(get))

    def _get(self, place: ColdPlace, position: int, length: int) -> Attempt[memoryview]:
        get = self._getter(place)
        return self._environment.spawn(lambda: get(position, length))

    def _getter(self, place: ColdPlace) -> Callable[[int, int], memoryview]:
        def get(position: int, length: int) -> memoryview:
            now = self._environment.monotonic
            with self._lock:
                self._gets += 1
            began = now()
            data = self._stores.get(place, position, length)
            took = now() - began
            with self._lock:
                self._bytes += len(data)
                self._get_s += (took - self._get_s) / PIECES  # over about a buffer of them
            return data

        return get

    # -- where it ends -----------------------------------------------------------------------------

    def _go_on(self, found: _Log) -> None:
        """All that was located is read: look up what comes next.  More may be cold by now."""
        cursor = found.cursor
        cursor.next_offset = offset = max(cursor.next_offset, found.located_to)
        if offset < self._stop and self._again(found, offset):
            return
        self._hot[cursor.tp] = offset
        self._leave(found, f"offset {offset} of {cursor.tp} is at the broker")

    def _again(self, found: _Log, offset: int) -> bool:
        """Ask for places from `offset` on; False: there are none."""
        tp = found.cursor.tp
        view = self._locate({tp: offset}).get(tp)
        if view is not None and isinstance(view.error, OffsetOutOfRangeError):
            self.release([tp])
            raise view.error
        if view is None or not view.places:
            return False
        self._drop(found)
        found.places.extend(view.places)
        found.located_to = view.places[-1].end_offset
        return True

    def _look_again(self, found: _Log, place: ColdPlace, error: KdirectError) -> None:
        """An object is gone, or its signed URL is refused: look up where its records are now."""
        tp = found.cursor.tp
        offset = max(found.cursor.next_offset, place.start_offset)
        self._stores.forget(place)
        before, found.renewed = found.renewed, (place.segment_id, offset)
        if found.renewed == before:
            self._failed(found, error)
        if not self._again(found, offset):
            self._leave(found, error.message)
        is_same = found.places[0].segment_id == place.segment_id
        if is_same and isinstance(error, ObjectNotFoundError):
            self.release([tp])
            raise error  # the broker would not find it, either

    def _failed(self, found: _Log, error: KdirectError) -> NoReturn:
        """The store cannot be read: with `auto` the broker is asked."""
        if self._stores.mode != "auto":
            self.release([found.cursor.tp])
            raise error
        self._stores.give_up(error)
        self._leave(found, error.message)

    def _leave(self, found: _Log, why: str) -> NoReturn:
        """The partition is to be entered again, by another way."""
        self.release([found.cursor.tp])
        raise AccessDeniedError(why)

    # -- looking -----------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """By the names of `kdirect.metrics`; nothing while nothing was located or fetched."""
        if not self._lookups and not self._gets:
            return {}
        with self._lock:
            return {
                "client_cold_gets": self._gets,
                "client_cold_bytes": self._bytes,
                "client_cold_lookups": self._lookups,
                "client_cold_wait_ms": round(self._waited_s * 1000),
            }


def cold_reads(
    connections: ColdConnections,
    settings: Mapping[str, Any],
    environment: Environment,
    **more: Any,
) -> ColdReads | None:
    """`ColdReads` over the connections of a session, unless nothing may be read past the broker,
    which alone names aborted transactions."""
    stores = connections.cold_stores
    committed_only = settings["isolation.level"] == "read_committed"
    if stores is None or stores.mode == "broker" or committed_only:
        return None
    return ColdReads(connections.cluster, settings, stores, environment, **more)


def _head(opened: _Opened) -> Attempt[Any] | None:
    """What is waited for next of an object; None: nothing, it is at hand or at its end."""
    if not opened.is_open:
        return opened.opening
    return opened.under_way[0][0] if opened.under_way else None


def _is_of_the_log(error: KdirectError) -> bool:
    """Does whoever reads the partition by another way meet the same error?"""
    passing = isinstance(error, (*LOST, OffsetOutOfRangeError, UnknownTopicError))
    return passing or has_moved(error)


def _only_cold(view: ColdView) -> ColdView:
    """Without what the broker has itself."""
    places = tuple(x for x in view.places if x.start_offset < view.local_start)
    return view._replace(places=places)


__all__ = ["ColdCursor", "ColdReads", "cold_reads"]
