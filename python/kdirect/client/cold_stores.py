"""The object stores that a process reads from, for one set of client settings.

Owns: which store is opened for a location, and with which credentials (`cold_trust`); the ranged
GET of a location, with a signed URL or with a key; and the memory of what did not work, so that the
broker and the store are not asked again for each reader: topics whose broker allows no direct
reads, and, with ``cold.reads=auto``, a store that cannot be read.

One warning tells why records are read through the broker, however many readers there are.  Thread-
safe.  Nothing is opened before it is needed, and a forked process opens its own
(`kdirect.objects.store`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kdirect.client.cold_places import ColdPlace
from kdirect.client.cold_trust import trusted_uri
from kdirect.errors import (
    CorruptObjectError,
    KdirectError,
    RemoteStorageError,
    RemoteUnavailableError,
)
from kdirect.model import TopicPartition
from kdirect.objects.presigned import get_presigned
from kdirect.objects.store import CONNECT_TIMEOUT_S, ObjectStore
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.client")

CREDENTIALS = "remote.config."
AGAIN_S = 300.0  # after which a store that could not be read is tried again
ATTEMPTS = 3  # of a GET
PAUSE_S = 0.2
MOST_SILENCE_S = 30.0  # of a store, in one attempt
MOST_PLACES = 20_000


class ColdStores:
    """See the module."""

    def __init__(self, settings: Mapping[str, Any], environment: Environment) -> None:
        self.mode: str = settings["cold.reads"]
        self.prefers_cold: bool = settings["prefer.cold"] and self.mode != "broker"
        self._own_uri: str | None = settings["remote.storage.uri"]
        self._config = {
            name.removeprefix(CREDENTIALS): str(value)
            for name, value in settings.items()
            if name.startswith(CREDENTIALS) and value is not None
        }
        self._environment = environment
        # All attempts end in half of the time that a reader waits: the broker needs some, too.
        half_s: float = settings["request.timeout.ms"] / 2000
        self._silence_s = min(half_s / ATTEMPTS, MOST_SILENCE_S)
        self._refused_s: float = settings["metadata.max.age.ms"] / 1000
        self._lock = threading.Lock()
        self._stores: dict[str, ObjectStore] = {}
        self._places: dict[tuple[TopicPartition, int], ColdPlace] = {}  # by base offset
        self._refused: dict[str, float] = {}  # topics, and until when
        self._given_up_until = float("-inf")
        self._warned = False

    # -- what is not tried -------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Are objects read at all, now?"""
        return self.mode != "broker" and self._environment.monotonic() >= self._given_up_until

    def is_refused(self, topic: str) -> bool:
        """Did its broker say a while ago that it is read through the broker?"""
        until = self._refused.get(topic)
        return until is not None and self._environment.monotonic() < until

    def refuse(self, topic: str) -> None:
        """Its broker says so."""
        with self._lock:
            self._refused[topic] = self._environment.monotonic() + self._refused_s

    def give_up(self, error: KdirectError) -> None:
        """With `auto`: a store cannot be read.  For a while all goes through the broker."""
        with self._lock:
            self._given_up_until = self._environment.monotonic() + AGAIN_S
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
        log.log(level, "records in remote storage are read through the broker: %s", error)

    # -- what was located before -------------------------------------------------------------------

    def remember(self, places: Iterable[ColdPlace]) -> None:
        """Somebody has located these, for what is read next; the broker is not asked again."""
        with self._lock:
            if len(self._places) > MOST_PLACES:
                self._places.clear()
            for place in places:
                self._places[_topic_partition(place), place.base_offset] = place

    def forget(self, place: ColdPlace) -> None:
        """It is not there any more."""
        with self._lock:
            self._places.pop((_topic_partition(place), place.base_offset), None)

    def known(self, tp: TopicPartition, offset: int) -> tuple[ColdPlace, ...]:
        """What was located of a partition from `offset` on, without a gap; () where the offset is
        in none of it."""
        with self._lock:
            mine = sorted(base for where, base in self._places if where == tp and base <= offset)
            found: list[ColdPlace] = []
            place = self._places[tp, mine[-1]] if mine else None
            while place is not None and place.end_offset > offset:
                found.append(replace(place, start_offset=offset))
                offset = place.end_offset
                place = self._places.get((tp, offset))
        return tuple(found)

    # -- reading -----------------------------------------------------------------------------------

    def name(self, place: ColdPlace) -> str:
        """The object, for messages."""
        if place.store_uri is None:
            return f"object {place.key}"
        return f"object {place.store_uri.partition('?')[0].rstrip('/')}/{place.key}"

    def get(self, place: ColdPlace, position: int, length: int) -> memoryview:
        """One ranged GET.  ObjectNotFoundError, RemoteAccessError and others of object stores;
        CorruptObjectError when the object is shorter."""
        try:
            return self._get(place, position, length)
        except RemoteStorageError as e:
            if type(e) is RemoteStorageError and self._is_cut(place, position + length):
                raise CorruptObjectError(
                    f"{self.name(place)} ends before byte {position + length}: it was cut",
                    hint="restore it from a good copy; `kdirect remote verify` checks all objects",
                ) from e
            raise

    def _get(self, place: ColdPlace, position: int, length: int) -> memoryview:
        if place.url is None:
            return memoryview(self._store(place).get(place.key, position, length)).cast("B")
        for attempt in range(ATTEMPTS):
            try:
                return get_presigned(
                    place.url,
                    position,
                    length,
                    connect_timeout_s=min(self._silence_s, CONNECT_TIMEOUT_S),
                    request_timeout_s=self._silence_s,
                )
            except RemoteUnavailableError:
                if attempt == ATTEMPTS - 1:
                    raise
                self._environment.sleep(PAUSE_S * 2**attempt)
        raise AssertionError

    def _is_cut(self, place: ColdPlace, end: int) -> bool:
        """Is the object there, and shorter than `end`?"""
        try:
            if place.url is None:
                size = self._store(place).size(place.key)
                return size is not None and size < end
            self._get(place, 0, 1)
        except KdirectError:
            return False
        return True

    def _store(self, place: ColdPlace) -> ObjectStore:
        assert place.store_uri is not None
        with self._lock:
            found = self._stores.get(place.store_uri)
            if found is None:
                uri = trusted_uri(place.store_uri, self._own_uri, self._config)
                found = self._stores[place.store_uri] = ObjectStore(
                    uri,
                    self._config,
                    connect_timeout_s=min(self._silence_s, CONNECT_TIMEOUT_S),
                    request_timeout_s=self._silence_s,
                    attempts=ATTEMPTS,
                )
            return found


def _topic_partition(place: ColdPlace) -> TopicPartition:
    return TopicPartition(place.identity.topic, place.identity.partition)


__all__ = ["ColdStores"]
